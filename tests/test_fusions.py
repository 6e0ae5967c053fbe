"""Fusion groups: what they hold, read, write and save, why they end; letters and bands; the ladder."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fixtures import traces
from fixtures.programs import Program

import tpu_lab
from tpu_lab import ends, fusions, hlo, letters
from tpu_lab.ladder import ladder, stablehlo_lines
from tpu_lab.metrics import Metrics
from tpu_lab.trace import LaunchRecord, OpRecord
from tpu_lab.viz import fusions as view
from tpu_lab.viz import gutter

SAMPLES = Path(__file__).parent / "fixtures" / "hlo"
MIB = 1 << 20


def op(index, name, kind="elementwise", phase="forward", line=None, module="", flops=0, forward=None):
    return OpRecord(index, f"aten.{name}", (), (), (), kind, module, "model.py", line or index + 1, "", phase, forward, 0, flops, 8, 0, 0)  # fmt: skip


def launch(ops, reason="item"):
    return LaunchRecord(0, tuple(r.index for r in ops), "hit", reason, "train.py", 43, "", "fused", "k", 0, 0, 0, 0, 100, 0, 0, 1, 1, 0, 0)  # fmt: skip


SAMPLE_OPS = [
    op(0, "mm.default", "matmul", flops=1000), op(1, "add.Tensor"), op(2, "gelu.default"), op(3, "sum.default", "reduce"),
    op(4, "topk.default", "movement"), op(5, "loop.default", "matmul"), op(6, "index.Tensor", "movement"),
]  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    """The groups that both real compilers made of the same seven ops, by the compiler's name."""
    out = {}
    for name, compiler in (("cpu", "XLA:CPU"), ("tpu", "XLA:TPU v6e")):
        text = (SAMPLES / f"small_{name}.txt").read_text(encoding="utf-8")
        out[name] = {g.name: g for g in fusions.groups(text, SAMPLE_OPS, launch(SAMPLE_OPS), compiler)}
    return out


def test_bytes_of_a_loop_fusion_by_hand(samples):
    g = next(g for g in samples["cpu"].values() if g.ops == (1, 2))
    assert g.kind == "elementwise" and g.words == "add, gelu" and g.lines == (("model.py", 2), ("model.py", 3))
    assert g.bytes_in == MIB + 4096 and g.bytes_out == MIB  # x @ w and the bias; the gelu's result
    assert g.saved == 2 * MIB  # the sum is neither written nor read again


def test_one_op_alone_saves_nothing(samples):
    for side in samples.values():
        for g in side.values():
            assert g.saved >= 0
            if len(g.ops) == 1 and g.opcode == "fusion":
                assert g.saved == 0, g


def test_the_two_compilers_draw_different_boundaries(samples):
    cpu, tpu = samples["cpu"], samples["tpu"]
    matmul = next(g for g in cpu.values() if g.ops == (0,) and g.kind == "matmul")
    assert (matmul.kind, matmul.end, matmul.flops) == ("matmul", "own kernel", 1000)
    joined = tpu["fusion.13"]
    assert joined.ops == (0, 1, 2, 3) and joined.kind == "matmul" and joined.flops == 1000
    assert joined.end != "own kernel" and joined.saved > 2 * MIB
    assert {g.compiler for g in tpu.values()} == {"XLA:TPU v6e"}
    assert sum(g.flops for g in cpu.values()) == sum(g.flops for g in tpu.values()) == 1000


def test_what_the_compiler_adds_holds_no_op_and_wears_no_letter(samples):
    start = samples["tpu"]["copy-start"]
    assert (start.ops, start.letter, start.end, start.kind) == ((), "", "copy", "movement")
    assert start.bytes_in == start.bytes_out == 2 * MIB  # a weight fetched into VMEM
    assert "copy-done" not in samples["tpu"]


def test_every_reason_is_of_the_closed_list_and_names_groups_that_exist(samples):
    known = {key: re.split(r"\{\w+\}", words) for key, words in ends.ENDS.items()}
    for side in samples.values():
        names = {g.letter for g in side.values()} | set(side)
        for g in side.values():
            assert all(piece in g.why for piece in known[g.end]), g.why
            by = re.match(r"(?:read by )?(\S+) reads", g.why)
            assert not by or by[1] in names, g.why


def program(body: str, ops, called: str = "", reason="item"):
    text = (
        f"HloModule m\n{called}\nENTRY %main (a: f32[64]) -> f32[64] {{\n  %a = f32[64]{{0}} parameter(0)\n{body}\n}}\n"
    )
    made = fusions.groups(text, ops, launch(ops, reason), "XLA:CPU")
    return {g.name: g for g in made}


def line(name, code, reads, at, root=False, size="f32[64]{0}"):
    return f'  {"ROOT " if root else ""}%{name} = {size} {code}({reads}), metadata={{op_name="jit(run)/{at}:aten.x/y"}}'


LOOP = """%spread (p: f32[64]) -> f32[64,64] {
  %p = f32[64]{0} parameter(0)
  %b = f32[64,64]{1,0} broadcast(%p), dimensions={0}, metadata={op_name="jit(run)/1:aten.x/y"}
  ROOT %e = f32[64,64]{1,0} negate(%b), metadata={op_name="jit(run)/1:aten.x/y"}
}
%plain (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %n = f32[64]{0} negate(%q), metadata={op_name="jit(run)/1:aten.x/y"}
}
"""


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("reader is a matmul", "negate(%a)", "dot(%one, %a)"),
        ("reader stands alone", "negate(%a)", "sort(%one)"),
        ("random", "rng(%a)", "negate(%one)"),
        ("reduction", "reduce(%a, %a)", "fusion(%one), kind=kLoop, calls=%plain"),
        ("read many times", "exponential(%a)", "fusion(%one), kind=kLoop, calls=%spread"),
        ("moves data", "transpose(%a)", "fusion(%one), kind=kLoop, calls=%plain"),
        ("not shown", "negate(%a)", "fusion(%one), kind=kLoop, calls=%plain"),
        ("reader is a library", "negate(%a)", "fusion(%one), kind=kCustom, calls=%plain"),
        ("own library", "fusion(%a), kind=kCustom, calls=%plain", "negate(%one)"),
        ("own kernel", "dot(%a, %a)", "negate(%one)"),
        ("collective", "all-reduce(%a)", "negate(%one)"),
    ],
)
def test_why_a_group_ends(key, first, second):
    ops = [op(0, "x.default"), op(1, "x.default")]
    body = "\n".join(
        f'  {root}%{name} = f32[64]{{0}} {code}, metadata={{op_name="jit(run)/{at}:aten.x/y"}}'
        for name, code, at, root in (("one", first, 0, ""), ("two", second, 1, "ROOT "))
    )
    made = program(body, ops, LOOP)
    assert made["one"].end == key, made["one"].why
    assert made["two"].end == ("collective" if made["two"].kind == "collective" else "result")
    assert made["two"].why.endswith("item() needs the value, train.py:43")


def test_several_readers_and_what_is_kept_for_the_way_back():
    ops = [op(0, "exp.default"), op(1, "sin.default"), op(2, "mul.Tensor", phase="backward", forward=0), op(3, "neg.default")]  # fmt: skip
    body = [line("one", "exponential", "%a", 0), "  %kept = f32[64]{0} copy(%one)", line("two", "sine", "%one", 1),
            line("back", "multiply", "%kept, %two", 2), line("end", "negate", "%one", 3),
            "  ROOT %t = (f32[64]{0}, f32[64]{0}, f32[64]{0}) tuple(%back, %end, %two)"]  # fmt: skip
    made = program("\n".join(body), ops)
    assert made["one"].why == "read by B and C, and by a on the way back"  # through the copy, too
    assert made["two"].why == "a result of the program, and read by a on the way back"
    assert made["kept"].letter == "" and made["kept"].end == "copy"


def test_a_slice_of_a_weight_counts_by_what_it_takes():
    ops = [op(0, "select.int", "movement")]
    body = line("s", "slice", "%a", 0, True, "f32[2]{0}") + ", slice={[0:2]}"
    assert program(body, ops)["s"].bytes_in == 8


def test_letters():
    assert [letters.spell(i, "forward") for i in (0, 8, 23, 24, 47, 48)] == ["A", "J", "Z", "AA", "AZ", "BA"]
    assert letters.spell(8, "backward") == "j" and letters.spell(8, "optimizer") == "9"
    every = {letters.spell(i, phase) for i in range(24) for phase in ("forward", "backward")}
    assert not every & set("IOilo")


def test_equal_blocks_share_letters():
    m = Metrics(traces.mingpt(2))
    made = fusions.of(m)
    blocks = {}
    for g in made:
        if g.block.startswith("h.") and g.phase == "forward":
            blocks.setdefault(g.block, []).append(g.letter)
    assert len(blocks) == 6 and fusions.modules_alike(made) == ("h.0", 6)
    inner = [blocks[f"h.{i}"] for i in range(1, 5)]  # the last one ends in ln_f
    assert all(b == inner[0] for b in inner) and len(set(inner[0])) == len(inner[0])
    records = {r.index: r for r in m.trace.ops}
    assert all((records[g.ops[-1]].phase == "backward") == g.letter.islower() for g in made if g.letter.isalpha())
    assert sum(g.ns for g in made) == pytest.approx(sum(r.device_ns for r in m.launches_in(m.span)))


def test_bands(tmp_path):
    source = tmp_path / "m.py"
    source.write_text("def f(x):\n    a = x @ x\n    b = a + 1\n    return b.exp()\n\n\ny = f(1)\n", encoding="utf-8")
    at = {"file": str(source), "bytes": 64}
    ops = [replace(op(i, n, k, line=at_), **at) for i, (n, k, at_) in enumerate(
        [("mm.default", "matmul", 2), ("add.Tensor", "elementwise", 2), ("exp.default", "elementwise", 3), ("sin.default", "elementwise", 4)])]  # fmt: skip
    records = {r.index: r for r in ops}
    base = fusions.Group(
        "XLA:CPU", 0, "A", "", "mm", "dot", "matmul", "forward", (0,), "mm", (), 0, 0, 0, 0, 3.0, "share"
    )
    loop = replace(base, letter="B", kind="elementwise", ops=(1, 2, 3), words="add, exp, sin")
    (listing,) = gutter.listings([[base, loop], [replace(loop, compiler="XLA:TPU v6e")]], records)
    assert [(x.number, x.keyword, x.gap) for x in listing.lines] == [(1, "def", False), (2, "", False), (3, "", False), (4, "return", False)]  # fmt: skip
    lanes = [x.lanes for x in listing.lines]
    matmul, band = lanes[1][0]
    assert (matmul.letter, matmul.lines) == ("A", 1) and (band.letter, band.lines) == ("B", 3)
    assert lanes[2][0] == (None, None)  # covered by the band above
    assert lanes[1][2][0].lines == 3 and lanes[1][2][1] is None  # the other compiler: alone, so lane 1
    assert sum(a + b for x in listing.lines for a, b in x.costs[:1]) == pytest.approx(6.0)
    (crowd,) = gutter.listings([[base, loop, replace(loop, letter="C"), replace(loop, letter="D")]], records)
    first, more = crowd.lines[1].lanes[0]
    assert first.letter == "A" and more.letter == "+3" and "D: add" in more.tip


def test_the_ladder():
    m = Metrics(traces.mingpt(2, layers=1))
    g = next(g for g in fusions.of(m) if "softmax" in g.words and g.phase == "forward")
    records = {r.index: r for r in m.trace.ops}
    of = m.launches_in(m.span)[0]
    module = hlo.parse(m.trace.programs[of.key].hlo())
    made = ladder(g, of, records, module, stablehlo_lines(m.trace.programs[of.key].stablehlo()))
    assert [x.split(" = ")[1].split("(")[0] for x in made.aten] == ["aten.div.Tensor", "aten.masked_fill.Scalar", "aten._softmax.default"]  # fmt: skip
    assert (
        made.aten[0].endswith("# model.py:45") and len(made.stablehlo) == 3 and "stablehlo.reduce" in made.stablehlo[2]
    )
    assert made.hlo[0].startswith(f"%{g.name} = ") and "metadata" not in "".join(made.hlo)
    assert ladder(g, of, records, module, {}, most=1).aten[-1] == "\u2026 2 more lines"


def test_a_second_compiler_stands_at_the_right_and_is_never_mixed():
    m = Metrics(traces.mingpt(2, layers=2))
    right = [replace(g, compiler="XLA:TPU v6e", ns=1e3, timing="bound") for g in fusions.of(m)]
    drawn = view.draw(m, right=right, note="compiled ahead of time, nothing ran on a TPU")
    assert drawn.title.startswith("XLA:TPU v6e makes ") and "XLA:CPU" in drawn.title and len(drawn.title) <= 85
    assert "nothing ran on a TPU" in drawn.text() and "\u2265" in drawn.html
    assert set(drawn.rows.compiler) == {"XLA:CPU", "XLA:TPU v6e"}
    assert max(map(len, drawn.text().splitlines())) <= 100


def test_the_view_refuses_an_order_it_does_not_know():
    with pytest.raises(ValueError, match="sorts by time, saved, bytes"):
        view.draw(Metrics(traces.mingpt(2, layers=1)), sort="name")


def test_a_made_up_program_has_one_scope_for_each_op():
    ops = [r for r in traces.mingpt(1, layers=1).ops]
    module = hlo.parse(Program(ops).hlo())
    found = frozenset().union(*hlo.scopes(module).values())
    assert found == {i for i, r in enumerate(ops) if r.kind != "view"}


# --- on the device -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    x, w, b = torch.randn(32, 64).to("tpu"), torch.randn(64, 128).to("tpu"), torch.randn(128).to("tpu")

    def run():
        return F.gelu(x @ w + b).sum().item()

    return {mode: tpu_lab.profile(run, steps=2, warmup=1, mode=mode) for mode in ("fused", "strict")}


def test_fused_gelu_has_at_most_three_groups(small):
    table = small["fused"].fusions.rows
    own = table[table.letter != ""]
    assert 1 <= len(own) <= 3
    assert {name.split(".")[1] for i in own.ops.sum() for name in [small["fused"].trace.ops[i].name]} >= {"mm", "gelu"}
    assert own.saved.sum() > 0 and own.why.str.contains("item\\(\\) needs the value").any()


def test_strict_gelu_launches_each_op(small):
    m = small["strict"].metrics
    assert len(m.launches_in(m.span)) >= 4
    assert "strict mode joins nothing" in str(small["strict"].fusions)
    assert fusions.placed(m)[0] == fusions.placed(m)[1] > 0


def test_measured_times_come_from_the_kernels(small):
    drawn = small["fused"].fusions_measured(runs=3)
    assert set(drawn.rows.timing) == {"measured"} and (drawn.rows.ms > 0).all()
    assert "XLA:CPU, measured" in str(drawn)


def test_the_text_of_the_ops_reads_no_compilers_text(monkeypatch):
    x = torch.ones(8, 8, device="tpu")
    p = tpu_lab.profile(lambda: (x @ x).exp().sum().item(), steps=2, mode="fused", peak_flops=1e12)
    read = []
    parse = fusions.hlo.parse
    monkeypatch.setattr(fusions.hlo, "parse", lambda text: read.append(text) or parse(text))
    assert "exp" in p.ops.text() and not read
    assert 'data-fusion="A"' in p.ops.html and len(read) == 1 and set(p.ops.rows.fusion) >= {"A"}
