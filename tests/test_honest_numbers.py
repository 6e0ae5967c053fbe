"""Numbers of real runs: parts that add up to the wall time, FLOPs by hand, MFU and HFU."""

import inspect
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tpu_lab
from tpu_lab import causal
from tpu_lab.chips import Peak
from tpu_lab.difference import compare
from tpu_lab.metrics import Metrics
from tpu_lab.models import mingpt
from tpu_lab.trace import OpRecord

MS = 1_000_000


def nap_and_read(x, w):
    y = (x @ w).relu()
    time.sleep(0.05)
    return y.sum().item()


@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
def test_parts_of_a_real_run_add_up_to_its_wall_time(mode):
    x, w = torch.ones(64, 64, device="tpu"), torch.ones(64, 64, device="tpu")
    start = time.perf_counter_ns()
    p = tpu_lab.profile(nap_and_read, x, w, steps=3, warmup=1, mode=mode, peak_flops=1e12)
    around = time.perf_counter_ns() - start
    m = p.metrics
    assert sum(ns for _, ns in m.whole.parts()) == pytest.approx(m.wall_ns, rel=0.02) and m.wall_ns <= around
    for step in m.steps:
        assert sum(ns for _, ns in step.split.parts()) == pytest.approx(step.ns, rel=0.02)
        assert step.split.idle + step.split.python >= 45 * MS  # the sleep, whoever else was busy
    assert sum(s.split.idle for s in m.steps) >= 45 * MS * len(m.steps) / 2
    (wait,) = {(w.what, w.line) for w in p.trace.waits}
    assert wait == ("item", inspect.getsourcelines(nap_and_read)[1] + 3)
    assert all(s.split.transfer + s.split.device > 0 for s in m.steps)
    rows = p.summary.rows
    shown = rows[(rows.part == "time") & (rows.unit == "ms")].set_index("name").value
    assert shown[["compile", "device", "transfer", "dispatch", "Python", "idle"]].sum() == pytest.approx(m.wall_ns / 1e6, rel=0.02)


def test_a_compile_is_said_and_set_apart():
    x = torch.ones(7, 53, device="tpu")  # a shape of its own: not compiled before

    def step():
        return (x * 3 - 1).cos().sum().item()

    p = tpu_lab.profile(step, steps=3, mode="fused", peak_flops=1e12)
    m = p.metrics
    compiled = sum(c.trace_ns + c.lower_ns + c.compile_ns for c in p.trace.compiles)
    assert compiled > 0 and m.whole.compile == pytest.approx(compiled, rel=0.02)
    assert [s.misses for s in m.steps] == [1, 0, 0] and m.step_split.compile == 0
    assert m.steps[0].split.compile == pytest.approx(compiled, rel=0.02)
    assert all(s.number > 1 for s in m.steady)
    assert "compile " in p.summary.html and "1 miss" in str(p)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.b(self.a(x).relu())


FORWARD = 2 * 8 * 16 * 32 * 2  # two layers on 8 rows


@pytest.mark.parametrize("how", ["not at all", "reentrant", "saved", "compiled"])
def test_recomputation_is_in_hfu_only(how):
    model = Two().to("tpu")
    x = torch.ones(8, 16, device="tpu", requires_grad=True)

    def run(x):
        if how == "not at all":
            return model(x).sum()
        return checkpoint(model, x, use_reentrant=how == "reentrant").sum()

    fn = torch.compile(run) if how == "compiled" else run
    p = tpu_lab.profile(lambda: fn(x).backward(), steps=2, warmup=1, mode="strict", peak_flops=1e12)
    m, again = p.metrics, [op for op in p.trace.ops if op.recomputed]
    assert m.flops == 3 * FORWARD  # backward is twice forward
    if how == "not at all":
        assert not again and m.recomputed == 0 and m.hfu == m.mfu and "HFU" not in str(p)
        return
    assert all(op.phase == "backward" for op in again) and {op.kind for op in again} >= {"matmul"}
    assert FORWARD / 2 <= m.recomputed <= FORWARD  # the last product need not run again: nothing reads its result
    assert m.hfu == pytest.approx(m.mfu * (m.flops + m.recomputed) / m.flops) and m.hfu > m.mfu
    assert "HFU" in str(p) and "HFU, with recomputation" in p.summary.html


def test_a_double_backward_is_no_recomputation():
    w = torch.ones(4, 4, device="tpu", requires_grad=True)
    with tpu_lab.profile(mode="strict", peak_flops=1e12) as p:
        (g,) = torch.autograd.grad((w @ w).sum(), w, create_graph=True)
        (g * g).sum().backward()
    assert not any(op.recomputed for op in p.trace.ops)


def test_mingpts_flops_by_hand():
    config, size = mingpt.Config.tiny(), 4
    model = mingpt.Model(config).to("tpu")
    ids, following = (t.to("tpu") for t in mingpt.batch(config, size))
    p = tpu_lab.profile(lambda: mingpt.loss(model, ids, following).backward(), steps=1, warmup=2, mode="fused", peak_flops=1e12)
    tokens, c, t = size * config.block, config.width, config.block
    weights = config.layers * (3 * c * c + c * c + 4 * c * c + 4 * c * c) + c * config.vocabulary  # no embedding
    products = config.layers * 2 * t * c  # a token: scores with t others over the heads, and mixing their values
    assert p.metrics.flops == 3 * tokens * 2 * (weights + products)
    assert not any(op.flops for op in p.trace.ops if "embedding" in op.name)
    by_phase = {way: sum(o.flops for o in m_ops(p) if o.phase == way) for way in ("forward", "backward")}
    assert by_phase["backward"] == 2 * by_phase["forward"]
    # by the convention causal attention is half of the square that ran
    assert p.metrics.flops - mingpt.flops(config, size) == 3 * tokens * products
    told = Metrics(p.trace, Peak(1e12, "f32", "x", "x"), flops=mingpt.flops(config, size))
    assert told.mfu == pytest.approx(p.metrics.mfu * mingpt.flops(config, size) / p.metrics.flops)


class Attention(torch.nn.Module):
    """f32[2,4,length,8] queries over `keys` keys."""

    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, q, k, v):
        first = torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.how)
        return torch.nn.functional.scaled_dot_product_attention(first, k, v, **self.how)


def attention(length, keys, how, mode, **given):
    """A profile of a step, and the FLOPs of all its products: two calls, of a product for scores and one for mixing."""
    q, k, v = (torch.ones(2, 4, n, 8, device="tpu", requires_grad=True) for n in (length, keys, keys))
    fn = torch.compile(Attention(**how)) if mode == "compiled" else Attention(**how)
    p = tpu_lab.profile(
        lambda: fn(q, k, v).sum().backward(), steps=1, warmup=2, mode="strict" if mode == "compiled" else mode, peak_flops=1e12, **given
    )  # fmt: skip
    return p, 3 * 2 * 2 * (2 * 2 * 4 * length * keys * 8)


@pytest.mark.parametrize("mode", ["strict", "fused", "compiled"])
def test_causal_attention_is_half_of_the_model_flops_and_runs_in_full(mode):
    p, square = attention(16, 16, {"is_causal": True, "dropout_p": 0.1}, mode)
    m = p.metrics
    assert sum(op.flops for op in m_ops(p)) == square
    assert m.flops == square / 2 == m.masked and m.hfu == pytest.approx(2 * m.mfu)
    assert "HFU, with the masked half of causal attention" in p.summary.html and "HFU" in str(p)
    assert "causal attention half" in p.summary.html


@pytest.mark.parametrize("mode", ["fused", "compiled"])
@pytest.mark.parametrize("how", [{}, {"attn_mask": "any"}])
def test_attention_with_no_mask_or_any_mask_counts_in_full(how, mode):
    if how:
        how = {"attn_mask": torch.ones(16, 16, device="tpu", dtype=torch.bool)}
    p, square = attention(16, 16, how, mode)
    assert p.metrics.flops == square and p.metrics.masked == 0 and p.metrics.hfu == p.metrics.mfu


@pytest.mark.parametrize("length, keys, kept", [(8, 16, 1 / 4), (16, 8, 3 / 4)])
def test_of_a_rectangle_what_is_under_the_diagonal_counts(length, keys, kept):
    p, square = attention(length, keys, {"is_causal": True}, "strict")
    assert p.metrics.flops == square * kept


def test_an_attention_that_is_one_op_counts_half_too():
    def op(index, name, inputs, phase, forward=None):
        static = ("is_causal=True",)
        return OpRecord(index, f"aten.{name}.default", inputs, ("f32[2,4,16,8]",), static, "matmul", "", "m.py", 3, "", phase, forward, 0, 4096, 0, 0, 0)  # fmt: skip

    qkv = ("f32[2,4,16,8]",) * 3
    ops = [op(5, "_scaled_dot_product_flash_attention", qkv, "forward"),
           op(6, "_scaled_dot_product_flash_attention_backward", ("f32[2,4,16,8]", *qkv), "backward", 5)]  # fmt: skip
    assert causal.masked(ops) == {5: 2048, 6: 2048}


def m_ops(p):
    return [op for op in p.metrics.ops_in(p.metrics.span) if op.kind == "matmul"]


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_products_of_every_form_count_and_gradients_of_grouped_convolutions_too(mode):
    a, b, v = (torch.ones(*shape, device="tpu") for shape in ((4, 5), (5, 6), (5,)))
    c, w, out = torch.ones(4, 6, device="tpu"), torch.ones(4, device="tpu"), torch.empty(4, 6, device="tpu")
    with tpu_lab.profile(mode=mode, peak_flops=1e12) as p:
        torch.mm(a, b, out=out)
        c.addmm_(a, b)
        kept = [torch.mv(a, v), torch.addmv(w, a, v), torch.dot(v, v), torch.addbmm(c, a.expand(2, 4, 5), b.expand(2, 5, 6))]
    assert [op.flops for op in p.trace.ops if op.flops] == [240, 240, 40, 40, 10, 480]
    del kept
    conv = torch.nn.Conv2d(4, 8, 3, groups=4, padding=1).to("tpu")
    x = torch.ones(2, 4, 8, 8, device="tpu")
    once = 2 * 2 * 64 * 8 * 9  # 2 images, 8 x 8 places, 8 channels out, 9 taps of 1 channel in
    with tpu_lab.profile(mode=mode, peak_flops=1e12) as p:
        conv(x).sum().backward()
        conv(x.requires_grad_()).sum().backward()
    assert [op.flops for op in p.trace.ops if op.flops] == [once, once, once, 2 * once]


def test_a_fused_function_without_an_optimizer_runs_in_its_own_step():
    a = torch.ones(64, 64, device="tpu")
    p = tpu_lab.profile(lambda: (a @ a).sum(), steps=3, mode="fused", peak_flops=1e12)
    assert [len(r.ops) for r in p.trace.launches] == [2, 2, 2]
    assert p.metrics.flops == 2 * 64**3


@pytest.mark.parametrize("peak", [0, -1.0, float("nan")])
def test_a_peak_that_nothing_has_is_refused(peak):
    with pytest.raises(ValueError, match="peak_flops"):
        tpu_lab.profile(lambda: None, peak_flops=peak)


def test_what_a_fused_program_leaves_out_did_no_work():
    a, b = torch.ones(64, 64, device="tpu"), torch.ones(64, 64, device="tpu")

    def step():
        (a @ b).exp()  # nobody holds it
        return ((a @ b) + 1, b.relu())[0].sum().item()

    p = tpu_lab.profile(step, steps=2, warmup=1, mode="fused", peak_flops=1e12)
    one = 2 * 64**3
    assert p.metrics.flops == one and {r.flops for r in p.trace.launches} == {one}
    assert [op.flops for op in m_ops(p)] == [0, one] and {op.launch for op in m_ops(p)} == {p.trace.launches[-1].index}
    assert [len(r.ops) for r in p.trace.launches] == [6, 6, 6]  # their places are those of the program's scopes

    def dead():
        a @ b

    p = tpu_lab.profile(dead, steps=2, mode="fused", peak_flops=1e12)
    assert not p.trace.launches and p.metrics.flops == 0 and p.metrics.mfu is None
    assert [(op.launch, op.bytes) for op in p.trace.ops] == [(None, 0)] * 2
    with tpu_lab.profile(mode="fused", peak_flops=1e12) as p:
        a @ b
        torch.tpu.synchronize()
        total = (a + b).sum().item()
    assert total == 2 * 64 * 64 and [r.ops for r in p.trace.launches] == [(1, 2)]


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_steps_that_nobody_waits_for_take_as_long_as_their_work(mode):
    a = torch.ones(400, 400, device="tpu")

    def step():
        out = a
        for _ in range(4):
            out = out @ a
        return out

    p = tpu_lab.profile(step, steps=2, warmup=1, mode=mode, peak_flops=1e15)
    ready = max(r.ready_ns for r in p.trace.launches)
    assert p.metrics.late_ns == 0 and 0 < ready <= p.metrics.steps[-1].end_ns


def test_the_line_that_calls_a_whole_model_has_its_costs_by_module():
    """Of a model that a library brings there is no other line of the user's."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("tpu"), torch.randn(2, 4, 16).to("tpu")

    def step():
        model(x).sum().backward()

    m = tpu_lab.profile(step, steps=2, warmup=1, mode="fused").metrics
    forward = {cost.name: cost for cost in m.costs if cost.phase == "forward" and cost.part}
    assert {"layers.0–1.linear1", "layers.0–1.norm1", "layers.0–1.self_attn"} <= forward.keys()
    assert len({(cost.file, cost.line) for cost in forward.values()}) == 1
    assert sum(cost.ops for cost in m.costs) == sum(op.kind != "view" for op in m.averaged) / m.n
    lines = [(line.line, line.phase) for line in compare(m, m).lines]
    assert len(lines) == len(set(lines)), "a comparison is by line"
