"""Why a program was made: real code that misses, and the sentence that says why, word for word."""

import pytest
import torch

import tpu_lab  # noqa: F401  registers the device
from tpu_lab.backend import causes
from tpu_lab.backend.cache import cache


@pytest.fixture(autouse=True)
def no_programs():
    torch.tpu._clear_cache()


def misses(run):
    """(cause, sentence) of each program that `run()` makes."""
    before = set(cache.programs)
    run()
    torch.tpu.synchronize()
    return [(p.cause, p.why) for key, p in cache.programs.items() if key not in before]


def ones(*size):
    return torch.ones(*size).to("tpu")


def scaled(x):
    return (x * 3).cpu()


LAST = " (last batch is smaller): use drop_last=True or pad"
GROWS = " (a sequence grows by one): pad to its final length"
# what ran before, what runs now, cause, sentence; in strict mode an argument is named alone, in fused mode with its op
PAIRS = {
    "last batch": (lambda: ones(8, 4), lambda: ones(7, 4), "shape", "{self}: f32[7,4], was f32[8,4]" + LAST),
    "larger batch": (lambda: ones(8, 4), lambda: ones(12, 4), "shape", "{self}: f32[12,4], was f32[8,4]"),
    "growing": (lambda: ones(1, 6), lambda: ones(1, 7), "shape", "{self}: f32[1,7], was f32[1,6]" + GROWS),
    "rank": (lambda: ones(8, 4), lambda: ones(8, 4, 2), "shape", "{self}: f32[8,4,2], was f32[8,4] (another number of dimensions)"),
    "dtype": (lambda: ones(8, 4), lambda: torch.ones(8, 4).half().to("tpu"), "dtype", "{self}: f16[8,4], was f32[8,4] (dtype changed)"),
    "transposed": (
        lambda: ones(4, 4), lambda: ones(4, 4).t(), "view",
        "{self} is another view: strides (1, 4), offset 0 in f32[4,4], was contiguous",
    ),
    "cut": (
        lambda: ones(8, 4), lambda: ones(9, 4)[1:], "view",
        "{self} is another view: strides (4, 1), offset 4 in f32[9,4], was contiguous",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode, name", [(1, "self"), (0, "self of aten.mul.Tensor")], ids=["strict", "fused"])
@pytest.mark.parametrize("case", PAIRS)
def test_an_input_that_changed(case, mode, name):
    before, now, cause, sentence = PAIRS[case]
    with torch.tpu.set_eager_mode(mode):
        misses(lambda: scaled(before()))
        assert misses(lambda: scaled(now())) == [(cause, sentence.format(self=name))]


def test_a_smaller_layer_is_no_last_batch():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows):
        optimizer.zero_grad()
        model(torch.ones(rows, 6).to("tpu")).square().mean().backward()
        optimizer.step()

    with torch.tpu.set_eager_mode(1):
        first = misses(lambda: step(5))
        assert len(first) > 10 and not [why for _, why in first if "batch" in why]
        misses(lambda: step(5))
        found = [why for _, why in misses(lambda: step(3)) if "batch" in why]
        assert len(found) >= 3 and all("[3" in why.partition(", was f32[5")[0] and why.endswith(LAST) for why in found)


def test_a_size_that_goes_up_and_down_has_no_last_batch():
    with torch.tpu.set_eager_mode(1):
        found = [misses(lambda n=n: scaled(ones(n, 4))) for n in (8, 7, 5, 12, 3)]
    assert [why for [(_, why)] in found[1:] if "batch" in why] == ["self: f32[7,4], was f32[8,4]" + LAST]
    x = ones(8, 4)
    misses(lambda: (x * 2).cpu())
    assert not any("batch" in why for _, why in misses(lambda: (x[3:] * 2).cpu()))  # another line


def test_the_first_time():
    with torch.tpu.set_eager_mode(1):
        assert misses(lambda: scaled(ones(8, 4))) == [("first", "first aten.mul.Tensor of this kind")]
    torch.tpu._clear_cache()
    with torch.tpu.set_eager_mode(0):
        assert misses(lambda: scaled(ones(8, 4))) == [("first", "first time this graph ran")]


@pytest.mark.parametrize("mode", [1, 0], ids=["strict", "fused"])
def test_a_constant(mode):
    x = ones(8, 4)
    with torch.tpu.set_eager_mode(mode):
        misses(lambda: x.sum(0).cpu())
        assert misses(lambda: x.sum(1).cpu()) == [
            ("constant", "aten.sum.dim_IntList: dim=[1], was dim=[0] (an integer or option is part of the program)")
        ]


@pytest.mark.parametrize("mode", [1, 0], ids=["strict", "fused"])
def test_the_size_of_what_is_made_is_a_shape(mode):
    made = {
        "size of aten.ones.default: [{}], was [{}]": lambda n: torch.ones(n, device="tpu").cpu(),
        "end of aten.arange.default: {}, was {}": lambda n: torch.arange(n, device="tpu").cpu(),
        "size of aten.randn.default: [2, {}], was [2, {}]": lambda n: torch.randn(2, n, device="tpu").cpu(),
        "n of aten.eye.default: {}, was {}": lambda n: torch.eye(n, device="tpu").cpu(),
        "repeats of aten.repeat.default: [{}], was [{}]": lambda n: ones(3).repeat(n).cpu(),
    }
    with torch.tpu.set_eager_mode(mode):
        for words, make in made.items():
            for n in (8, 5, 6, 7):
                found = misses(lambda n=n, make=make: make(n))
                if n == 7:
                    assert found == [("shape", words.format(7, 6) + " (a sequence grows by one): pad to its final length")]


def test_a_compiler_option():
    x = ones(8, 4)
    with torch.tpu.set_eager_mode(0):
        misses(lambda: scaled(x))
        with torch.tpu.compiler.custom_compiler_options({"xla_cpu_enable_fast_min_max": True}):
            assert misses(lambda: scaled(x)) == [("option", "option xla_cpu_enable_fast_min_max: True, was not set")]


def test_another_mode():
    x = ones(8, 4)

    def step(x):
        return x.exp().sum().cpu()

    with torch.tpu.set_eager_mode(1):
        misses(lambda: step(x))
    with torch.tpu.set_eager_mode(0):
        assert misses(lambda: step(x)) == [
            ("mode", "the same 2 ops ran op by op before: fused mode makes one program of them")
        ]
        misses(lambda: step(x.relu()))
    with torch.tpu.set_eager_mode(1):
        assert misses(lambda: step(x.relu())) == [
            ("mode", "aten.relu.default ran in a fused program before: strict mode compiles each op alone")
        ]


def test_results_that_are_held():
    x = ones(8, 4)

    def step(hold):
        a = x * 3
        b = a.exp()
        c = b.sum()
        if not hold:
            del a, b
        return c.cpu()

    with torch.tpu.set_eager_mode(0):
        misses(lambda: step(False))
        assert misses(lambda: step(True)) == [
            ("live set", "2 results are still held (aten.mul.Tensor, aten.exp.default): a result that a Python name holds is an output of the program")
        ]  # fmt: skip


def test_memory_that_cannot_be_reused():
    def step(hold):
        a = ones(8, 4)
        held = a.view(-1) if hold else None
        b = a + 1
        del a
        return b.cpu(), held

    with torch.tpu.set_eager_mode(0):
        misses(lambda: step(False))
        assert misses(lambda: step(True)) == [
            ("donation", "self of aten.add.Tensor is still held, so its memory cannot take a result; before it could")
        ]


def test_other_ops_at_the_same_line():
    def step(x, more):
        y = x.exp()
        if more:
            y = y.sin()
        return y.sum().cpu()

    with torch.tpu.set_eager_mode(0):
        misses(lambda: step(ones(8, 4), False))
        assert misses(lambda: step(ones(8, 4), True)) == [
            ("ops", "3 ops, were 2: op 1 is aten.sin.default, was aten.sum.default")
        ]


def test_a_sequence_whose_first_dimension_grows_is_one_from_its_third_length_on():
    with torch.tpu.set_eager_mode(1):
        whys = [misses(lambda: scaled(ones(n, 16)))[0][1] for n in (4, 5, 6)]
    assert whys[1] == "self: f32[5,16], was f32[4,16]"
    assert whys[2] == "self: f32[6,16], was f32[5,16]" + GROWS


def test_torch_compile_says_it_in_dynamos_words_and_the_users_names():
    net = torch.nn.Linear(4, 3).to("tpu")

    @torch.compile(backend="tpu")
    def f(x, k):
        return (net(x) * k).sum()

    with torch.no_grad():
        assert misses(lambda: f(ones(8, 4), 2)) == [("first", "first time this graph ran")]
        assert misses(lambda: f(ones(7, 4), 2)) == [
            ("shape", "Dynamo traced it again: tensor 'x' size mismatch at index 0. expected 8, actual 7" + LAST)
        ]
        assert misses(lambda: f(ones(6, 4), 2)) == [("shape", "x: f32[6,4], was f32[7,4]")]  # no last batch after a last batch
        assert misses(lambda: f(ones(6, 4), 3)) == [("constant", "Dynamo traced it again: k was 2")]
        net.double()
        x = torch.ones(6, 4, dtype=torch.float64).to("tpu")
        (cause, why), = misses(lambda: f(x, 3))  # fmt: skip
        assert cause == "dtype" and why.startswith("Dynamo traced it again: ") and "expected Float, actual Double" in why


def test_the_nearest_of_many_is_found_without_looking_at_all():
    views = [
        causes.View("fused", (f"{i}.py", i), tuple((f"op{i}.{k}", ("f32[8]",), ()) for k in range(100)), (("x", f"f32[{8 + i}]"),))
        for i in range(40)
    ]  # fmt: skip
    looked = []

    class Counted(causes.Earlier):
        def alike(self, view):
            found = super().alike(view)
            looked.extend(found)
            return found

    earlier = Counted(views * 100)
    new = causes.View("fused", ("new.py", 1), views[7].ops, (("x", "f32[14]"),))
    assert causes.explain(new, earlier) == ("shape", "x: f32[14], was f32[15]")
    assert 0 < len(looked) <= causes.WORK // 100
    other = causes.View("strict", ("new.py", 1), (views[3].ops[0],), (("x", "f32[8]"),))
    assert causes.explain(other, earlier)[0] == "mode"


def test_inputs_of_a_compiled_function_have_the_users_names():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, *args, scale):
            return args[0] * self.w * scale["by"]

    net = torch.compile(Net().to("tpu"), dynamic=True)
    with torch.no_grad():
        for rows in (9, 8):
            found = misses(lambda rows=rows: net(ones(rows, 4), scale={"by": ones(1)}))
    assert found == [("shape", "args[0]: f32[8,4], was f32[9,4]" + LAST)]


def test_dynamos_reasons_lose_their_numbers():
    reason = "0/2: ___check_type_id(k, 139843661561056), type=<class 'int'>  # return net(x)*k  # a.py:21 in f (HINT: type int)\nUser"
    assert causes._retraced(reason) == ("constant", "Dynamo traced it again: k was of type int")
    assert causes._retraced("0/4: GLOBAL_STATE changed: grad_mode ") == (
        "option", "Dynamo traced it again: changed globally: grad_mode",
    )  # fmt: skip
    assert causes._retraced("1/0: tensor 'x' stride mismatch at index 0. expected 4, actual 1")[0] == "view"
