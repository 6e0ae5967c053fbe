"""The trace is complete and true: its ops are the dispatcher's, call by call, and replaying them on a CPU gives the results."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import tpu_lab
from tpu_lab import trace
from tpu_lab.backend import dtypes
from tpu_lab.models import dlrm, mingpt, resnet, unet

MODELS = {
    "mingpt": (mingpt, mingpt.Config(layers=1, heads=2, width=16, block=8, dropout=0.0)),
    "resnet": (resnet, resnet.Config(blocks=(1, 1), width=4, image=12)),
    "dlrm": (dlrm, dlrm.Config.tiny()),
    "unet": (unet, unet.Config(width=4, levels=(1,), blocks=1, image=8, groups=2)),
}
OPTIMIZERS = {"mingpt": lambda p: torch.optim.AdamW(p, lr=1e-3)}
SGD = lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-4)  # noqa: E731


def place_of(t):
    """What tells one tensor's memory from another's: storage, offset, sizes and strides, dtype."""
    return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype


class Calls(TorchDispatchMode):
    """Notes each call that has a tpu tensor among arguments or results, with all that a replay needs."""

    def __init__(self):
        super().__init__()
        self.calls, self.held = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_map_only(torch.Tensor, self._note, (args, kwargs))
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        avals = tuple(dtypes.aval(t.shape, t.dtype) for t in inputs)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if any(t.device.type == "tpu" for t in (*inputs, *outputs)):
            self.calls.append((func, given, avals, tree_map_only(torch.Tensor, self._note, out)))
        return out

    def _note(self, t):
        if t.device.type != "tpu":
            return t.clone()
        self.held.append(t)  # its storage stays, so no other tensor gets its address
        return Place(place_of(t))


class Place(tuple):
    """Stands for a tpu tensor in a noted call."""

    def __new__(cls, items):
        return super().__new__(cls, items)


def replay(calls, memory):
    """Run the calls on CPU tensors. memory: place -> CPU tensor; it grows by the results."""
    storages = {place[0]: t for place, t in memory.items()}

    def cpu(place):
        if place not in memory:  # another view of memory that is there
            base = storages[place[0]]
            memory[place] = base.as_strided(place[2], place[3], place[1])
        return memory[place]

    def is_place(x):
        return isinstance(x, Place)

    for func, (args, kwargs), _, out in calls:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        args, kwargs = torch.utils._pytree.tree_map(lambda x: cpu(x) if is_place(x) else x, (args, kwargs), is_leaf=is_place)
        with torch.no_grad():
            result = func(*args, **kwargs)
        places = tree_flatten(out, is_leaf=is_place)[0]
        for place, t in zip(places, tree_flatten(result)[0], strict=True):
            if is_place(place):
                memory[place] = t
                storages[place[0]] = t
    return memory


@pytest.fixture(scope="module", params=[(name, mode) for name in MODELS for mode in ("strict", "fused")], ids="-".join)
def recorded(request):
    """(trace, calls, memory before, tensors after) of one training step, cold."""
    name, mode = request.param
    module, config = MODELS[name]
    torch.manual_seed(0)
    model = module.Model(config).to("tpu")
    optimizer = OPTIMIZERS.get(name, SGD)(model.parameters())
    batch = [t.to("tpu") for t in module.batch(config, 4, seed=0)]
    state = [*model.parameters(), *model.buffers(), *batch]
    memory = {Place(place_of(t)): t.detach().cpu().clone() for t in state}
    quick = torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": 0})  # compiled cold, run once
    with quick, tpu_lab.profile(mode=mode, peak_flops=1e9) as p:
        with Calls() as noted:
            loss = module.loss(model, *batch)
            loss.backward()
            optimizer.step()
    after = [loss, *model.parameters(), *(q.grad for q in model.parameters() if q.grad is not None), *model.buffers()]
    return p.trace, noted.calls, memory, after, noted.held


# What has no record: a new name for the same memory, and memory that nobody has written. Neither does anything.
FREE = {"aten.detach.default", "aten.alias.default", "aten.empty.memory_format"}
# What torch's C++ makes of a call before it reaches a device that has no kernel of its own for it.
MADE_OF = {
    "aten.binary_cross_entropy_with_logits.default": "log_sigmoid_forward empty_like fill_ sub_ mul_ sub_ mean".split(),
}


def matched(t, calls):
    """(call, its records) in order. A view is one record for each result."""
    records, pairs = iter(t.ops), []
    for call in calls:
        func, _, _, out = call
        name = f"{func._schema.name.replace('::', '.')}.{func._overloadname}"
        if name in FREE:
            continue
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        count = len(results(out)) if view else len(MADE_OF.get(name, (name,)))
        found = [next(records, None) for _ in range(count)]
        assert None not in found, f"the trace ends before {name}"
        if name in MADE_OF:
            assert [r.name.split(".")[1] for r in found] == MADE_OF[name]
        elif view:
            assert {r.name for r in found} == {name} and {r.kind for r in found} == {"view"}
        else:
            assert found[0].name == name
        pairs.append((call, found))
    assert next(records, None) is None, "the trace has ops that nobody called"
    return pairs


def results(out):
    return [p for p in tree_flatten(out, is_leaf=lambda x: isinstance(x, Place))[0] if isinstance(p, Place)]


def test_the_ops_are_the_dispatchers_one_by_one(recorded):
    t, calls, *_ = recorded
    assert len(matched(t, calls)) > 40 and not t.dropped
    assert [r.index for r in t.ops] == list(range(len(t.ops)))


def test_each_record_says_what_its_call_was(recorded):
    t, calls, *_ = recorded
    compared = 0
    for (func, (args, kwargs), avals, out), found in matched(t, calls):
        shapes = [dtypes.aval(p[2], p[4]) for p in results(out)]
        if found[0].kind == "view":
            assert [r.inputs for r in found] == [avals[:1]] * len(found)
            assert [r.outputs for r in found] == [(s,) for s in shapes]
        elif len(found) == 1:
            assert found[0].inputs == avals, found
            if shapes and not func._schema.is_mutable:
                assert list(found[0].outputs) == shapes, found
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        for text in found[0].static if len(found) == 1 else ():
            key, _, value = text.partition("=")  # a number that is the program's input shows its type
            assert value in (str(given[key]), f"({type(given[key]).__name__})"), (found, given)
            compared += 1
    assert compared


def test_every_op_is_part_of_one_launch_or_free(recorded):
    t, *_ = recorded
    ran = [i for launch in t.launches for i in launch.ops]
    assert sorted(ran) == [r.index for r in t.ops if r.launch is not None] and len(set(ran)) == len(ran)


def test_replaying_the_calls_on_a_cpu_gives_the_results(recorded):
    _, calls, memory, after, _ = recorded
    memory = replay(calls, dict(memory))
    for t in after:
        torch.testing.assert_close(t.detach().cpu(), memory[Place(place_of(t))], rtol=2e-4, atol=2e-5)


def test_nothing_is_left_active(recorded):
    assert trace.active is None
