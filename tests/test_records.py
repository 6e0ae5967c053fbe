"""The records are true: every aten call that reaches the device, with the user's line, module, phase and launch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tpu_lab  # noqa: F401  registers the device
from tpu_lab import trace
from tpu_lab.backend import executor, launches
from tpu_lab.backend.where import watch_modules

MODES = [pytest.param(1, id="strict"), pytest.param(0, id="fused"), pytest.param(2, id="debug")]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.block = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(8, 3))

    def forward(self, x):
        h = self.first(x)  # the first layer
        h = h * 2  # outside of the submodules
        return self.block(h).view(-1, 3)  # the block


class Count(TorchDispatchMode):
    """The names of the aten calls with a tpu tensor among arguments or results, below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(f"{func._schema.name.replace('::', '.')}.{func._overloadname}")
        return out


def start_step():
    torch.manual_seed(0)
    net = Net().to("tpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(5, 4).to("tpu"), torch.tensor([0, 1, 2, 0, 1]).to("tpu")

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)  # the loss
        loss.backward()
        optimizer.step()
        return loss.item()  # the wait

    return step


def record(f, mode):
    with torch.tpu.set_eager_mode(mode):
        torch.tpu.synchronize()
        with watch_modules():
            active = trace.start()
            try:
                f()
                executor.flush("synchronize")
            finally:
                trace.stop()
        launches.drain()
    return active


@pytest.fixture(scope="module", params=MODES)
def step_trace(request):
    step = start_step()
    step()
    return record(step, request.param)


@pytest.mark.parametrize("mode", MODES)
def test_the_records_are_what_a_dispatch_mode_counts(mode):
    x, w = torch.randn(4, 4).to("tpu"), torch.randn(4, 4).to("tpu")

    def program():
        y = (x @ w).relu_().add(1)
        z = y.view(16).view(2, 8).sum(1)
        z.mul_(y.as_strided((2,), (1,)))
        return torch.softmax(z, 0)

    with Count() as count:
        program()
    active = record(program, mode)
    assert [r.name for r in active.ops] == count.names
    assert [r.index for r in active.ops] == list(range(len(active.ops)))


def test_a_step_has_every_op_once_and_launches_share_them_out(step_trace):
    t = step_trace
    launched = [i for launch in t.launches for i in launch.ops]
    assert launched == sorted(set(launched))
    for op in t.ops:
        assert (op.launch is None) == (op.index not in launched), op
        if op.launch is not None:
            assert op.index in t.launches[op.launch].ops
    assert [launch.index for launch in t.launches] == list(range(len(t.launches)))
    assert not t.dropped and t.ops and t.launches


def test_lines_are_the_users(step_trace):
    for op in step_trace.ops:
        assert op.file == __file__, op
        with open(op.file, encoding="utf-8") as file:
            assert file.readlines()[op.line - 1].strip() == op.code
    lines = {op.code for op in step_trace.ops if op.phase == "forward"}
    assert {
        "h = self.first(x)  # the first layer", "h = h * 2  # outside of the submodules",
        "return self.block(h).view(-1, 3)  # the block",
        "loss = torch.nn.functional.cross_entropy(net(x), y)  # the loss",
    } <= lines  # fmt: skip


def test_modules_are_named_by_their_path(step_trace):
    found = {(op.name.split(".")[1], op.module) for op in step_trace.ops if op.phase == "forward"}
    assert {("addmm", "first"), ("gelu", "block.0"), ("addmm", "block.1"), ("mul", "")} <= found
    assert ("nll_loss_forward", "") in found


def test_phases(step_trace):
    phases = [op.phase for op in step_trace.ops]
    assert set(phases) == {"forward", "backward", "optimizer"}
    first = {p: phases.index(p) for p in ("forward", "backward", "optimizer")}
    assert first["forward"] < first["backward"] < first["optimizer"]
    assert len(step_trace.steps) == 1


def test_a_backward_op_names_its_forward_op(step_trace):
    ops = {op.index: op for op in step_trace.ops}
    pairs = {
        (op.name.split(".")[1], ops[op.forward].name.split(".")[1])
        for op in step_trace.ops
        if op.phase == "backward" and op.forward is not None
    }
    assert {("gelu_backward", "gelu"), ("nll_loss_backward", "nll_loss_forward"), ("mm", "addmm")} <= pairs
    for op in step_trace.ops:
        if op.phase == "backward" and op.forward is not None:
            forward = ops[op.forward]
            assert forward.phase == "forward" and (op.file, op.line, op.module) == (forward.file, forward.line, forward.module)
    known = [op.forward is not None for op in step_trace.ops if op.phase == "backward" and op.name.startswith("aten.mm")]
    assert known and all(known)


def test_times_and_sizes_are_filled(step_trace):
    for op in step_trace.ops:
        assert op.time_ns > 0 and op.record_ns > 0 and (op.host_ns > 0 or op.launch is None)
    for launch in step_trace.launches:
        assert launch.dispatch_ns > 0 and launch.lookup_ns >= 0 and launch.ready_ns >= launch.time_ns
    mm = next(op for op in step_trace.ops if op.name == "aten.addmm.default" and op.module == "first")
    assert mm.flops == 2 * 5 * 4 * 8 and mm.bytes == 4 * (5 * 4 + 4 * 8 + 8 + 5 * 8)
    assert mm.inputs == ("f32[8]", "f32[5,4]", "f32[4,8]") and mm.outputs == ("f32[5,8]",) and mm.kind == "matmul"


def test_the_wait_has_its_line(step_trace):
    (wait,) = step_trace.waits
    assert wait.what == "item" and wait.code == "return loss.item()  # the wait" and wait.file == __file__
    assert wait.bytes == 4


@pytest.mark.parametrize(
    "what, force",
    [("item", lambda x: x[0].item()), ("cpu", lambda x: x.cpu()), ("print", lambda x: str(x)),
     ("to tpu", lambda x: torch.ones(3).to("tpu")), ("synchronize", lambda x: torch.tpu.synchronize())],
)  # fmt: skip
def test_each_wait_is_recorded(what, force):
    x = torch.ones(3).to("tpu")
    active = record(lambda: force(x), 1)
    assert what in [w.what for w in active.waits]
    wait = next(w for w in active.waits if w.what == what)
    assert wait.file == __file__ and 'lambda x: ' in wait.code and wait.wait_ns >= 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2  # twice

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_ops_of_a_checkpoint_and_of_an_own_function_name_their_forward_op(reentrant):
    net, x = Net().to("tpu"), torch.ones(2, 4, device="tpu", requires_grad=True)
    run = lambda: Twice.apply(checkpoint(net, x, use_reentrant=reentrant)).sum().backward()  # noqa: E731
    run()  # then every parameter has a gradient to add to
    ops = record(run, 1).ops
    backward = [r for r in ops if r.phase == "backward" and not r.recomputed and r.name != "aten.add_.Tensor"]  # sums of two gradients
    assert len(backward) > 15 and all(r.forward is not None for r in backward)
    for r in backward:
        forward = ops[r.forward]
        assert (forward.phase == "forward" or forward.recomputed) and (forward.file, forward.line) == (r.file, r.line)
    doubled = next(r for r in backward if r.name == "aten.mul.Tensor" and "twice" in r.code)
    assert ops[doubled.forward].name == "aten.mul.Tensor"
    assert {r.code for r in ops if r.recomputed} >= {"h = self.first(x)  # the first layer"}


def test_a_view_has_the_name_of_the_users_call():
    x = torch.ones(4, 6, device="tpu", requires_grad=True)

    def views():
        return (x.t(), x.transpose(0, 1), x.permute(1, 0), x[0], x[:, 1:3], x.expand(2, 4, 6), x[None], x.squeeze(),
                x.split(2), x.split([1, 3]), x.unbind(), x.diagonal(), x.unfold(0, 2, 2), x.as_strided((2,), (1,)))  # fmt: skip

    got = [r.name.removeprefix("aten.") for r in record(views, 1).ops]
    assert got == ["t.default", "transpose.int", "permute.default", "select.int", "slice.Tensor", "expand.default",
                   "unsqueeze.default", "squeeze.default", *["split.Tensor"] * 2, *["split_with_sizes.default"] * 2,
                   *["unbind.int"] * 4, "diagonal.default", "unfold.default", "as_strided.default"]  # fmt: skip
    with pytest.raises(IndexError, match="Dimension out of range"):
        record(lambda: x.transpose(0, 5), 1)
    assert [r.name for r in record(lambda: x.as_strided((2,), (1,)), 1).ops] == ["aten.as_strided.default"]


def asks(x):
    if x.sum() > 1:  # bool
        pass
    assert not x.sum() < 1, "bool"
    any(v > 0 for v in (x.sum(),))  # bool
    n = x.sum().to(torch.int64)
    int(n)  # int
    float(
        n
    )  # float
    for _ in range(n):  # index
        pass
    [1, 2, 3, 4][n]  # index
    n.item()  # item


@pytest.mark.parametrize("mode", MODES)
def test_a_wait_says_who_asked(mode):
    active = record(lambda: asks(torch.ones(3, device="tpu")), mode)
    told = ["bool", "bool", "bool", "int", "float", "index", "index", "item"]
    assert [w.what for w in active.waits] == told
    if mode == 0:
        assert list(dict.fromkeys(r.reason for r in active.launches)) == ["bool", "int"]  # then it is known


def test_bytes_are_those_read_and_those_written():
    x, y, few = torch.ones(4, 8, device="tpu"), torch.ones(4, 8, device="tpu"), torch.ones(8, device="tpu")

    def run():
        x.add(few), x.add_(few), torch.add(x, few, out=y)
        x.mul(2), x.mul_(2)
        x.zero_(), x.fill_(3), x.copy_(y), x[:2].add_(few)

    one, row = 4 * 4 * 8, 4 * 8
    sizes = [op.bytes for op in record(run, 1).ops if op.kind != "view"]
    assert sizes == [2 * one + row] * 3 + [2 * one] * 2 + [one, one, 2 * one, 4 * 2 * 8 * 2 + row]
    compiled = torch.compile(lambda: x.copy_(y + 1))
    compiled()
    sizes = {op.name: op.bytes for op in record(compiled, 1).ops}
    assert sizes["aten.add.Tensor"] == sizes["aten.copy_.default"] == 2 * one


def test_compiles_say_why():
    torch.tpu._clear_cache()  # another file's programs may have had other options
    x = torch.ones(7, 3).to("tpu")
    active = record(lambda: (x.sinh(), x[:5].sinh(), x.sinh()), 1)
    compiles = [c for c in active.compiles if active.ops[active.launches[c.launch].ops[0]].name == "aten.sinh.default"]
    assert [c.cause for c in compiles] == ["first", "shape"]
    assert "f32[5,3], was f32[7,3]" in compiles[1].why
    for c in compiles:
        assert active.launches[c.launch].cache == "miss" and active.launches[c.launch].key == c.key
        assert c.compile_ns > 0 and c.lower_ns > 0 and "HloModule" in c.hlo() and c.site.startswith(__file__)
    assert [launch.cache for launch in active.launches][-1] == "hit"


def test_live_bytes_follow_the_program():
    x = torch.ones(1000).to("tpu")

    def program():
        y = x + 1
        z = y + 1
        del y
        return z * 1  # z dies after this

    for mode in (1, 0):
        active = record(program, mode)
        curve = [n for _, n in active.live]
        assert len(curve) == len(active.launches)
        if mode == 1:
            assert curve[1] - curve[0] == 4000 and curve[2] == curve[1]  # y is gone, the product has come


def test_live_bytes_do_not_count_a_donated_buffer_twice():
    x = torch.ones(1000).to("tpu")
    with torch.tpu.set_eager_mode(0):
        x.add_(1)
        torch.tpu.synchronize()
    held = []
    active = record(lambda: held.append(x.add_(1)), 0)
    assert active.launches[-1].donated == 1
    more = record(lambda: held.append(x.mul(1)), 0)
    assert more.live[-1][1] - active.live[-1][1] == pytest.approx(4000, abs=64)


def test_nothing_is_recorded_when_nobody_asks():
    step = start_step()
    active = trace.start()
    trace.stop()
    step()
    assert not (active.ops or active.launches or active.compiles or active.waits or active.live)


def test_a_small_trace_counts_what_it_drops():
    x = torch.ones(3).to("tpu")
    active = trace.start(limit=5)
    for _ in range(9):
        x + 1
    trace.stop()
    assert len(active.ops) == 5 and active.dropped >= 4


def test_two_traces_do_not_nest():
    trace.start()
    with pytest.raises(RuntimeError, match="already active"):
        trace.start()
    trace.stop()
    with pytest.raises(RuntimeError, match="no profile"):
        trace.stop()


def test_a_fallback_is_in_the_records():
    x = torch.ones(3, 3).to("tpu")
    active = record(lambda: torch.nonzero(x), 1)
    (op,) = [op for op in active.ops if op.name == "aten.nonzero.default"]
    assert op.launch is None and op.kind == "host" and op.outputs == ("i64[9,2]",) and not op.fallback
