"""An error in any hook that autograd calls comes out of backward as it is on the CPU, and never ends the process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, tpu_lab
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

class Mine(Exception): pass

def run(device, kind):
    p = torch.ones(3, device=device, requires_grad=True)
    def bad(*args):
        raise (KeyboardInterrupt if kind == "ctrl-c" else Mine)("in a hook")
    q = p * 2
    if kind in ("tensor", "ctrl-c"): q.register_hook(bad)
    if kind == "leaf": p.register_hook(bad)
    if kind == "accumulated": p.register_post_accumulate_grad_hook(bad)
    if kind == "node before": q.grad_fn.register_prehook(bad)
    if kind == "node after": q.grad_fn.register_hook(bad)
    if kind == "unpack":
        with saved_tensors_hooks(lambda t: t, bad): q = q.exp()
    if kind == "pack":
        with saved_tensors_hooks(bad, lambda t: t): q = q.exp()
    if kind == "module":
        m = torch.nn.Linear(3, 2).to(device); m.register_full_backward_hook(bad); q = m(q)
    if kind == "module before":
        m = torch.nn.Linear(3, 2).to(device); m.register_full_backward_pre_hook(bad); q = m(q)
    if kind in ("checkpoint", "reentrant"):
        calls = []
        def f(x):
            calls.append(1)
            if len(calls) > 1: bad()
            return x.exp()
        q = checkpoint(f, q, use_reentrant=kind == "reentrant")
    if kind == "compiled":
        q = torch.compile(lambda x: x.sin())(p); q.register_hook(bad)
    if kind == "grad":
        q.register_hook(bad); torch.autograd.grad(q.sum(), p)
    q.sum().backward()

def answer(device, kind):
    try:
        run(device, kind)
        return "nothing raised"
    except BaseException as error:
        where = error.__traceback__
        while where.tb_next: where = where.tb_next
        return f"{type(error).__name__}: {error} in {where.tb_frame.f_code.co_name}"

for kind in KINDS:
    for mode in ("strict", "fused"):
        torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE if mode == "fused" else torch.tpu.EagerMode.DEFER_NEVER
        here, there = answer("cpu", kind), answer("tpu", kind)
        p = torch.ones(3, device="tpu", requires_grad=True)
        (p * 3).sum().backward()  # and life goes on
        print(kind, mode, here == there and "in bad" in here and p.grad.tolist() == [3, 3, 3], here, there, sep="|", flush=True)

# and each of many threads gets its own
import threading
sys.setswitchinterval(1e-6)
found = []
def work(k):
    for i in range(60):
        def bad(grad): raise Mine((k, i))
        p = torch.ones(3, device="tpu", requires_grad=True)
        q = p * 2
        q.register_hook(bad)
        try: q.sum().backward()
        except BaseException as error: found.append(repr(error) == repr(Mine((k, i))))
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print("threads", "all", found.count(True), sep="|")
"""
KINDS = [
    "tensor", "leaf", "accumulated", "node before", "node after", "unpack", "pack", "module", "module before", "checkpoint",
    "reentrant", "compiled", "grad", "ctrl-c",
]  # fmt: skip


@pytest.fixture(scope="module")
def answers():
    """What a process of its own prints: an abort would take the other tests along."""
    code = f"KINDS = {KINDS!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=300
    )
    lines = [line.split("|") for line in done.stdout.splitlines()]
    return {(kind, mode): rest for kind, mode, *rest in lines}, f"exit {done.returncode}: {done.stderr[-1500:]}"


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_out_as_on_the_cpu(answers, kind, mode):
    lines, end = answers
    assert (kind, mode) in lines, end
    assert lines[kind, mode][0] == "True", lines[kind, mode]


def test_each_thread_gets_its_own(answers):
    lines, end = answers
    assert lines.get(("threads", "all")) == ["480"], (lines.get(("threads", "all")), end)
