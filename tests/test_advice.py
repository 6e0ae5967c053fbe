"""Each rule of the advice finds what it is for, and nothing in a trace without it."""

from dataclasses import replace

import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import advice
from tpu_lab.metrics import Metrics
from tpu_lab.trace import CompileRecord, LaunchRecord, OpRecord, Trace, WaitRecord

MS = 1_000_000


def steps(n=6, platform="cpu", mode="fused", inputs=("f32[64,128]", "f32[128,128]"), copies=1, copy_ms=0.1, launches=1, **op):
    """n steps of 10 ms: `copies` copies to the device, one matmul, `launches` launches, and nothing to complain about."""
    t = Trace(start_ns=0, meta={**traces.META, "platform": platform, "mode": mode, "cpu": []})
    kind = {"kind": "matmul", "fallback": False, **op}
    for k in range(n):
        at = k * 10 * MS
        for _ in range(copies):
            t.waits.append(WaitRecord("to tpu", "train.py", 40, "x = x.to('tpu')", at, 0, int(copy_ms * MS), 4096))
            at += int(copy_ms * MS)
        index = len(t.ops)
        t.ops.append(OpRecord(
            index, "aten.mm.default", inputs, ("f32[64,128]",), (), kind["kind"], "fc", "model.py", 53, "y = x @ w", "forward", None,
            len(t.launches), 2 * 64 * 128 * 128, 99, at, 900, kind["fallback"], 9000,
        ))  # fmt: skip
        for i in range(launches):
            start = at + MS // 10 + i * MS // 100
            device = 5 * MS // launches if mode == "fused" else 2000
            t.launches.append(LaunchRecord(
                len(t.launches), (index,) if i == 0 else (), "hit", "item", "train.py", 43, "loss.item()", mode, "k", start, 1000, 0, 6000,
                device, 1, 1, 1, 1, 0, k, start + 7000 + device,
            ))  # fmt: skip
        t.steps.append((k + 1) * 10 * MS)
    t.end_ns = n * 10 * MS
    t.marks.append(("block end", t.end_ns))
    return t


def with_compiles(t, causes, why="x: f32[9,4], was f32[8,4]"):
    """The last launches become misses for these causes."""
    for k, cause in enumerate(causes):
        i = len(t.launches) - 1 - k
        t.launches[i] = replace(t.launches[i], cache="miss", compile_ns=MS, key=f"n{k}")
        t.compiles.append(CompileRecord(i, f"n{k}", "compiled", MS // 2, MS // 4, MS // 4, why, cause, "train.py:43"))
    return t


def with_waits(t):
    for end in t.steps:
        t.waits.append(WaitRecord("item", "train.py", 43, "loss.item()", end - MS, MS // 2, 1000, 4))
    return t


LAST = "x: f32[5,4], was f32[8,4] (last batch is smaller): use drop_last=True or pad"
TPU = {"platform": "tpu", "inputs": ("bf16[64,128]", "bf16[128,128]")}
CASES = {  # rule -> (a trace it finds, a trace like it that is clean, line, what the evidence says)
    "compiles": (lambda: with_compiles(steps(12), ["shape"] * 6), lambda: with_compiles(steps(12), ["shape"]), 43, "6 programs at train.py:43 differ only by shape"),
    "last batch": (lambda: with_compiles(steps(), ["shape"], LAST), lambda: with_compiles(steps(), ["first"]), 43, "1 program of its own"),
    "wait": (lambda: with_waits(steps(copies=8, copy_ms=0.2)), lambda: steps(), 43, ".item() at train.py:43 makes the host wait"),
    "transfers": (lambda: steps(copies=8, copy_ms=0.4), lambda: steps(copies=2, copy_ms=0.1), 40, "8 copies a step, most at train.py:40"),
    "launch-bound": (lambda: steps(mode="strict", launches=80), lambda: steps(launches=80), 43, "80 launches a step"),
    "float32": (lambda: steps(platform="tpu"), lambda: steps(**TPU), 53, "1 float32 matmul a step, the longest at model.py:53"),
    "float64": (lambda: steps(inputs=("f64[64,128]", "f64[128,128]")), lambda: steps(inputs=("f64[]", "f32[128,128]")), 53, "1 op on float64 tensors a step, the first at model.py:53, takes 100%"),
    "tile": (lambda: steps(platform="tpu", inputs=("bf16[64,10]", "bf16[128,128]")), lambda: steps(**TPU), 53, "bf16[64,10] of mm at model.py:53: 10 is stored as 128"),
    "fallback": (lambda: steps(fallback=True), lambda: steps(), 53, "ran 6 times on the CPU at model.py:53"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_each_rule_finds_its_case_and_leaves_the_clean_one(kind):
    bad, clean, line, words = CASES[kind]
    found = {f.kind: f for f in advice.findings(Metrics(bad()), limit=9)}
    assert kind in found, found
    assert found[kind].line == line and words in found[kind].evidence, found[kind].evidence
    assert found[kind].gain_ns > 0 and found[kind].act.endswith(".") and len(found[kind].brief) < 100
    assert kind not in {f.kind for f in advice.findings(Metrics(clean()), limit=9)}


def test_an_op_that_only_the_host_can_run_is_no_read_of_the_user():
    x = torch.randn(8, 8).to("tpu")

    def step():
        return x[x > 0].sum(), torch.unique(x.round())

    p = tpu_lab.profile(step, steps=5, warmup=1, mode="strict", peak_flops=1e9)
    assert {w.what for w in p.trace.waits} >= {"aten.nonzero.default", "aten._unique2.default"} and not any(w.what == "cpu" for w in p.trace.waits)
    found = {f.kind: f for f in advice.findings(p.metrics, limit=9)}
    assert not found.keys() & {"wait", "transfers"} and "runs on the host, as the size of its result depends" in found["host op"].evidence
    clean = tpu_lab.profile(lambda: torch.where(x > 0, x, 0).sum(), steps=5, warmup=1, mode="strict", peak_flops=1e9)
    assert "host op" not in {f.kind for f in advice.findings(clean.metrics, limit=9)}


def test_a_read_beside_a_synchronize_on_one_line_is_the_read():
    t = with_waits(steps(copies=8, copy_ms=0.2))
    t.waits.insert(0, replace(next(w for w in t.waits if w.what == "item"), what="synchronize"))
    (found,) = (f for f in advice.findings(Metrics(t), limit=9) if f.kind == "wait")
    assert ".item() at train.py:43" in found.evidence


def test_a_cpu_is_no_tpu():
    kinds = {f.kind for f in advice.findings(Metrics(steps(inputs=("f32[64,10]", "f32[10,3]"))), limit=9)}
    assert not kinds & {"float32", "tile"}


def test_a_clean_trace_has_no_advice_and_at_most_three_are_given():
    assert advice.findings(Metrics(steps(**TPU))) == []
    bad = with_waits(with_compiles(steps(12, platform="tpu", copies=8, copy_ms=0.4, fallback=True), ["shape"] * 6))
    every = advice.findings(Metrics(bad), limit=9)
    assert len(every) > 3 and len(advice.findings(Metrics(bad))) == 3
    assert [f.gain_ns for f in every] == sorted((f.gain_ns for f in every), reverse=True)
