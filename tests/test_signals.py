"""Handlers of signals that raise, or run ops, in the middle of training: what they raise comes out, and nothing is lost."""

import os
import subprocess
import sys

import pytest

HEAD = """
import os, random, signal, sys, threading, time, torch, tpu_lab
torch.manual_seed(0)
torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE
model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)]).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3, device="tpu")).square().mean().backward()
    optimizer.step()
step(), step()
"""
RAISES = """
class TimeUp(Exception):
    def __init__(self, number, frame):
        super().__init__("time is up", number)
        self.number = number
def handler(number, frame):
    raise TimeUp(number, frame)
count = 0
for name in ("SIGALRM", "SIGTERM", "SIGUSR1", "SIGINT"):
    number = getattr(signal, name)
    signal.signal(number, handler)
    for _ in range(12):
        try:
            threading.Timer(random.uniform(0.002, 0.03), os.kill, (os.getpid(), number)).start()
            while True:
                step()
        except TimeUp as error:
            count += error.number == number and error.args == ("time is up", number)
step()
print("raises", count, all(torch.isfinite(p).all().item() for p in model.parameters()))
"""
EXITS = """
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(7))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:
    step()
"""
READS = """
before, seen, wrong = [p.detach().cpu() for p in model.parameters()], [], []
def reads(number, frame):
    try:
        seen.append([p.detach().cpu() for p in model.parameters()])  # a checkpoint, as before a cluster takes the machine back
        (torch.ones(3, device="tpu") * 2).tolist()
    except Exception as error:
        wrong.append(repr(error))
signal.signal(signal.SIGALRM, reads)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
x = torch.arange(4.0, device="tpu")
while len(seen) < 40 and not wrong:
    step()
    y = x * 2
    z = y + x
    w = z.clone().add_(y)
    w[1:3].mul_(2)
    if (found := torch.stack([x, y, z, w]).sum(0).tolist()) != [0, 16, 32, 33]:
        wrong.append(found)
signal.setitimer(signal.ITIMER_REAL, 0)
print("reads", wrong[:2], all(torch.isfinite(t).all() for t in seen[-1]))
"""
FINALIZERS = """
import gc
wrong, values = [], []
class Metric:
    def __init__(self): self.itself, self.total = self, torch.ones(3, device="tpu") * 2
    def __del__(self): values.append((self.total + 1).tolist())
gc.set_threshold(20, 1, 1)
x = torch.arange(4.0, device="tpu")
for _ in range(60):
    Metric(), Metric(), Metric()
    y = x * 2
    z = y + x
    w = z.clone().add_(y)
    w[1:3].mul_(2)
    if (found := torch.stack([x, y, z, w]).sum(0).tolist()) != [0, 16, 32, 33]:
        wrong.append(found)
gc.set_threshold(700, 10, 10)
gc.collect()
print("finalizers", wrong, len(values) > 20, all(v == [3, 3, 3] for v in values))
"""


@pytest.fixture(scope="module")
def done():
    """One process for all, as most of its time is its start."""
    code = HEAD + READS + FINALIZERS + RAISES + EXITS
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=120
    )


def test_a_handler_may_read_values_while_ops_are_recorded(done):
    assert done.stdout.splitlines()[:1] == ["reads [] True"], (done.returncode, done.stdout, done.stderr[-2000:])


def test_a_finalizer_may_read_values_while_ops_are_recorded(done):
    assert done.stdout.splitlines()[1:2] == ["finalizers [] True True"], (done.returncode, done.stdout, done.stderr[-2000:])


def test_what_a_handler_raises_comes_out_whole_in_the_middle_of_steps(done):
    assert done.stdout.splitlines()[2:3] == ["raises 48 True"], (done.returncode, done.stdout, done.stderr[-2000:])


def test_a_handler_that_exits_keeps_its_code(done):
    assert done.returncode == 7, (done.stdout, done.stderr[-2000:])


def test_nothing_is_raised_while_a_handler_is_being_left():
    """CPython may call a handler where C++ may throw nothing: what is raised comes out in Python code after it."""
    code = """
import queue, signal, threading, time, traceback, tpu_lab
from tpu_lab.backend import interrupts

interrupts._start()
gate, places = interrupts.Gate(queue.SimpleQueue().get), []  # get(True, 0.4) waits in C, then raises Empty
threading.Timer(0.1, interrupts._wanted.put, [interrupts.Press(signal.SIGALRM, TimeoutError("late"))]).start()
called = False
while len(places) < 2:
    try:
        if not called:
            called = True
            gate(True, 0.4)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass
    except (TimeoutError, queue.Empty) as error:
        places.append((type(error).__name__, traceback.extract_tb(error.__traceback__)[-1].name))
print(sorted(places))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[('Empty', '<module>'), ('TimeoutError', '<module>')]\n", (done.stdout, done.stderr[-2000:])
