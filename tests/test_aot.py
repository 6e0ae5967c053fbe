"""The TPU compiler's view: from its stored answer to owners and padding; and the real compiler where it is installed."""

import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures import v6e as stored
from test_views import _Page

import tpu_lab
from tpu_lab import aot, aot_compiler, fusions, padding
from tpu_lab.assignment import HBM, VMEM
from tpu_lab.backend.rehearsal import NoValue, rehearse
from tpu_lab.models import mingpt
from tpu_lab.targets import target
from tpu_lab.viz import v6e

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
WEIGHTS = sum(p.numel() for p in mingpt.Model(mingpt.Config.tiny()).parameters())
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install 'tpu-lab[tpu]'"
)


@pytest.fixture(scope="module")
def step():
    """The stored step of a tiny minGPT for v6e."""
    return stored.load()


# ---- whose bytes are where ---------------------------------------------------------------------------------------


def test_owners_hold_what_the_model_has(step):
    shares = {s.owner: s.bytes for s in step.main.placed.shares(HBM)}
    assert shares["weights"] == shares["gradients"] == 4 * WEIGHTS
    assert 8 * WEIGHTS <= shares["optimizer"] < 8 * WEIGHTS + 500  # and a step count


@pytest.mark.parametrize("space", [HBM, VMEM])
def test_shares_add_up_to_what_the_compiler_reserves(step, space):
    placed = step.main.placed
    assert sum(s.bytes for s in placed.shares(space)) == (placed.hbm if space == HBM else placed.vmem)
    assert 0 < placed.vmem <= step.target.vmem


def test_buffers_name_ops_modules_and_lines(step):
    scores = [b for b in step.main.placed.buffers if b.what == "scores" and b.space == "VMEM"]
    assert {b.module for b in scores} == {"h.0.attn", "h.1.attn"}
    assert {(b.file, b.owner) for b in scores} == {("mingpt.py", "activations")}
    made = [b for b in step.main.placed.buffers if b.kind == "temporary" and b.held > 4096]
    assert sum(b.line > 0 for b in made) / len(made) > 0.95


def test_a_bound_is_at_least_each_argument_and_result_moved_once(step):
    placed = step.main.placed
    read, written = placed.traffic
    assert read >= 4 * 3 * WEIGHTS and written >= 4 * 4 * WEIGHTS
    assert step.bound_ns == max(1e9 * (read + written) / 1.64e12, 1e9 * placed.flops / 918e12)
    assert sum(r + w for r, w in placed.moved.values()) == read + written


def test_groups_are_bounded_and_name_their_compiler(step):
    groups = step.groups
    assert {g.compiler for g in groups} == {"XLA:TPU v6e"} and {g.timing for g in groups} == {"bound"}
    assert sum(g.ns for g in groups) >= 0.99 * step.bound_ns


# ---- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, layout, lanes, sublanes, size, better",
    [
        ("f32[8,8,64,64]", "{3,2,1,0:T(8,128)}", 64, 8, 64, 128),
        ("bf16[8,8,64,32]", "{2,3,1,0:T(8,128)(2,1)}", 64, 8, 64, 128),
        ("f32[100,300]", "{1,0:T(8,128)}", 44, 4, 300, 384),
        ("f32[3,256]", "{1,0:T(8,128)}", 128, 3, 3, 8),
    ],
)
def test_the_tile_names_the_dimension_at_fault(shape, layout, lanes, sublanes, size, better):
    tile = padding.tile(shape, layout)
    assert (tile.lanes, tile.sublanes, tile.size, tile.better) == (lanes, sublanes, size, better)


def test_no_tile_for_flat_arrays():
    assert padding.tile("f32[768]", "{0:T(1024)}") is None


def test_layers_are_one_kind(step):
    kinds = padding.kinds(step.main.placed.buffers)
    worst = max(kinds, key=lambda k: k.waste)
    assert (worst.count, worst.factor, worst.module) == (2, 8.0, "h.0\u20131.attn")
    assert sum(k.held for k in kinds) == sum(b.held for b in step.main.placed.buffers)


# ---- the view ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fits", "too_big", "too_big_without_texts", "hostile"])
def test_the_view_is_golden_safe_and_fits_a_terminal(name):
    hostile = "<img onerror=alert(1)>"
    given = {"fits": {}, "too_big": {"refused": stored.OOM}, "hostile": {"module": hostile}}
    compiled = stored.load(**given.get(name, {"refused": stored.OOM, "texts": False}))
    text = compiled.view.text()
    file = GOLDEN / f"v6e_{name}.txt"
    if os.environ.get("TPU_LAB_GOLDEN") == "write":
        file.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == file.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100
    page = _Page()
    page.feed(compiled.view.html)
    assert not page.stack
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\(", compiled.view.html) and len(compiled.view.html) < 300_000
    assert compiled.view.html == stored.load(**given.get(name, {"refused": stored.OOM, "texts": False})).view.html
    assert "nothing ran on a TPU" in text and "step time" in text


def test_too_big_says_limit_and_need():
    compiled = stored.load(stored.OOM, texts=False)
    assert not compiled.fits
    assert compiled.view.title == "Does not fit in v6e: 39.7 GiB of HBM needed, 31.2 GiB there"
    assert list(compiled.rows.columns) == v6e.COLUMNS and not len(compiled.rows)


def test_rows_are_every_buffer(step):
    assert len(step.rows) == len(step.main.placed.buffers)
    assert step.rows.held.is_monotonic_decreasing and set(step.rows.space) == {"HBM", "VMEM"}


# ---- names -------------------------------------------------------------------------------------------------------


def test_chips_and_slices_have_their_names():
    assert target("v6e").topology == "v6e:1x1" and target("V7x").topology == "tpu7x:1x1x1"
    assert target("v6e:2x4").devices == 8 and target("v4:2x2x1").devices == 8  # v4 has two devices a chip
    assert target("trillium").name == "v6e"
    assert target("v6e:4x2").name == "v6e:2x4" and target("v5p:1x2x2").name == "v5p:2x2x1" and target("v6e:1x1").name == "v6e"
    assert target("v5p:24x16x16").devices == 6144 and target("v7x:4x4x8").devices == 256


@pytest.mark.parametrize("name", ["v9", "", "v6e:2x4x2", "v6e:0x4", "v5p:2x2", "v6e:3x5", "v6e:1000x1000", "v5p:16x16x32", "v4:2x2x3", None])
def test_a_wrong_chip_is_refused_before_anything_runs(name):
    with pytest.raises(ValueError, match="chip="):
        tpu_lab.compile_for(lambda: pytest.fail("it was called"), chip=name)


# ---- rehearsals --------------------------------------------------------------------------------------------------


class Training:
    """A small model, its optimizer and a step, as a script has them."""

    def __init__(self, width=16):
        self.model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)).to("tpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.x = torch.randn(32, 8).to("tpu")

    def step(self):
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_a_rehearsal_leaves_everything_as_it_was():
    training, other = Training(), torch.ones(3, device="tpu")
    training.step()
    before = [p.detach().cpu().clone() for p in training.model.parameters()]
    state = {k: float(v["step"]) for k, v in enumerate(training.optimizer.state.values())}
    random = torch.tpu.get_rng_state()
    with rehearse() as trace, aot.kept(training.step, (), {}):
        training.step()
        other.add_(1)
    assert all(torch.equal(b, p.cpu()) for b, p in zip(before, training.model.parameters(), strict=True))
    assert state == {k: float(v["step"]) for k, v in enumerate(training.optimizer.state.values())}
    assert other.tolist() == [1, 1, 1] and torch.equal(random, torch.tpu.get_rng_state())
    assert all(p.grad is None for p in training.model.parameters())
    assert [launch.reason for launch in trace.launches] == ["step end", "synchronize"]
    assert training.step().item() > 0  # and it trains on


def test_a_rehearsed_program_is_the_one_that_runs():
    training = Training()
    training.step()
    with rehearse() as trace:
        training.step()
    ran = tpu_lab.profile(training.step, mode="fused").trace.launches[0]
    rehearsed = trace.launches[0]
    names = ("inputs", "outputs", "donated", "flops", "key")
    assert [getattr(rehearsed, n) for n in names] == [getattr(ran, n) for n in names]


def test_reading_a_value_in_a_rehearsal_says_so_and_hurts_nothing():
    training = Training()

    def step():
        return training.step().item()

    with pytest.raises(NoValue, match=r"test_aot.py:\d+ \(return training.step\(\).item\(\)\).*compile_for runs nothing"):
        with aot.kept(step, (), {}), rehearse():
            step()
    assert step() > 0


def test_what_was_made_in_a_rehearsal_has_no_value():
    with rehearse():
        made = torch.ones(2, device="tpu") + 1
    with pytest.raises(NoValue, match="make it again"):
        made.cpu()


def test_a_model_without_memory_rehearses():
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 17, 1 << 17)  # 64 GiB
    model = model.to_empty(device="tpu")
    with rehearse() as trace:
        model(torch.empty(4, 1 << 17, device="tpu")).sum().backward()
    assert trace.launches[0].flops == 2 * 2 * 4 * (1 << 34)


def test_compile_for_needs_ops_on_the_device(monkeypatch):
    monkeypatch.setattr(aot_compiler, "versions", lambda: ("0", "0"))
    with pytest.raises(ValueError, match=r"no op of the function reached device 'tpu'"):
        tpu_lab.compile_for(lambda: torch.ones(3) + 1)
    with pytest.raises(TypeError, match="needs a function to call"):
        tpu_lab.compile_for(3)


def test_a_strict_profile_has_too_many_programs(monkeypatch):
    monkeypatch.setattr(aot_compiler, "versions", lambda: ("0", "0"))
    p = tpu_lab.profile(Training().step, mode="strict")
    with pytest.raises(ValueError, match=r'different programs \(strict mode\).*mode="fused"'):
        p.on("v6e")
    assert "different programs" in p.chip_view("v6e").text()


# ---- the child process -------------------------------------------------------------------------------------------


def _child(monkeypatch, tmp_path, code: str):
    """Another program in the compiler's place."""
    file = tmp_path / "child.py"
    file.write_text(code)
    monkeypatch.setattr(aot_compiler, "_CHILD", file)
    monkeypatch.setattr(aot_compiler, "versions", lambda: ("0", "0"))


def test_no_libtpu_is_one_sentence(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(aot.CompileError, match=r'not installed: pip install "tpu-lab\[tpu\]"'):
        tpu_lab.compile_for(Training().step)


def test_the_child_itself_finds_no_libtpu(tmp_path):
    request = tmp_path / "request.json"
    request.write_text(f'{{"out": "{tmp_path}", "deep": false}}')
    hide = f"import sys, runpy; sys.modules['libtpu'] = None; sys.argv = ['aot_child', {str(request)!r}]; "
    hide += f"runpy.run_path({str(aot_compiler._CHILD)!r}, run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", hide]).returncode == 3
    assert '"no libtpu"' in (tmp_path / "failed.json").read_text()
    with pytest.raises(aot.CompileError, match=r"pip install"):
        aot_compiler._ended(tmp_path, 3, False, target("v6e"))


def test_a_crash_is_one_sentence(monkeypatch, tmp_path):
    _child(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(aot.CompileError, match=r"process was ended by SIGSEGV while compiling for v6e.*unharmed"):
        aot_compiler.ask(b"a program", target("v6e"))


def test_a_time_limit_ends_the_child(monkeypatch, tmp_path):
    _child(monkeypatch, tmp_path, f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(aot.CompileError, match=r"did not finish within 2 s.*give limit="):
        aot_compiler.ask(b"a program", target("v6e"), limit=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_ends_the_child(monkeypatch, tmp_path):
    _child(monkeypatch, tmp_path, "import time; time.sleep(60)")
    children = []

    def interrupted(self, seconds):
        raise KeyboardInterrupt

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])
    monkeypatch.setattr(aot_compiler._Progress, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        aot_compiler.ask(b"a program", target("v6e"))
    assert children[0].returncode == -signal.SIGKILL


# ---- the real compiler -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    training = Training(width=32)
    return training, tpu_lab.compile_for(training.step, name="a small net")


@needs_compiler
def test_a_step_is_compiled_for_v6e(compiled):
    _, step = compiled
    assert step.fits and len(step.groups) > 3 and "T(8,128)" in step.hlo
    assert {s.owner for s in step.main.placed.shares(HBM)} >= {"weights", "optimizer", "gradients", "inputs"}
    assert step.main.launch.donated == 12  # four parameters, and two states of each
    assert "a small net" in step.view.text() and "XLA:TPU v6e" in step.fusions.text()


@needs_compiler
def test_the_second_time_needs_no_compiler(compiled, monkeypatch):
    training, first = compiled
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("the compiler was started"))
    again = tpu_lab.compile_for(training.step)
    assert again.main.answer.cached and again.hlo == first.hlo


@needs_compiler
def test_a_profile_shows_both_compilers_side_by_side(compiled):
    training, first = compiled
    training.step()
    p = tpu_lab.profile(training.step, mode="fused")
    step = p.on("v6e")
    assert step.main.answer.cached  # the very program that was rehearsed
    there, here = len(fusions.users(step.groups)), len(fusions.users(step.cpu_groups))
    assert f"{there} groups, XLA:CPU makes {here} \u00b7" in step.view.text()
    assert re.fullmatch(f"XLA:TPU v6e makes {there} groups of this (step|run), XLA:CPU {here}", step.fusions.title)
    assert p.fusions.finding.startswith(f"{here} groups save ")
    ops = len(p.metrics.ops_in(p.metrics.span))
    stepping = sum(g.phase == "optimizer" for g in fusions.users(step.groups))
    words = f"{ops} ops run as {there} groups" + f", {stepping} of them the optimizer's" * (there > ops)
    assert first.fusions.title.startswith(words + ": ")  # of one of the two rehearsed calls
    assert {g.compiler for g in step.groups} == {"XLA:TPU v6e"}
    assert "XLA:CPU" in step.fusions.text() and "XLA:TPU v6e" in step.fusions.text()


@needs_compiler
def test_a_topology_that_is_none_is_one_sentence(compiled, monkeypatch):
    training, _ = compiled
    unknown = replace(target("v6e:2x4"), topology="v6e:3x5")
    monkeypatch.setattr(aot, "target", lambda name: unknown)
    with pytest.raises(aot.CompileError, match=r"libtpu knows no topology 'v6e:3x5'"):
        tpu_lab.compile_for(training.step)


@needs_compiler
def test_a_batch_that_does_not_divide_and_gradients_that_add_up_are_said():
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(3)]).to("tpu")
    size, x = 3 * 128 * 128 * 4, torch.ones(33, 128, device="tpu")
    c = tpu_lab.compile_for(lambda: model(x).sum().backward(), chip="v6e:2x4")  # no zero_grad: the second call adds
    assert c.view.title.startswith("Fits in one device of v6e:2x4")
    assert "not split over 8 devices, sizes are of the whole: no input's first dimension (33) divides by 8" in c.view.text()
    shares = {s.owner: s.bytes for s in c.main.placed.shares(HBM)}
    assert shares["weights"] == shares["gradients"] == size and c.main.launch.donated == 3


@needs_compiler
def test_a_slice_splits_the_batch_and_adds_the_gradients_up(compiled):
    training, one = compiled
    slice_ = tpu_lab.compile_for(training.step, chip="v6e:2x4")
    assert any(i.opcode.startswith("all-reduce") for i in slice_.main.placed.collectives)
    assert slice_.main.placed.flops == one.main.placed.flops // 8
    assert "split over 8 devices" in slice_.view.text() and "collective" in slice_.view.text()


@needs_compiler
def test_deep_gives_the_compilers_own_estimates(compiled):
    training, one = compiled
    with pytest.raises(RuntimeError, match="deep=True"):
        _ = one.estimates
    deep = tpu_lab.compile_for(training.step, deep=True)
    assert deep.estimates and all(cycles > 0 for cycles in deep.estimates.values())
    assert set(deep.estimates) & {g.name for g in deep.groups}
