"""Everything torch expects of a device: the name, torch.tpu, moves, numbers, workers, threads, memory."""

import gc
import os
import subprocess
import sys
import threading
import warnings

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tpu_lab


def child(code: str, **environment):
    """Run code in a fresh Python; its result."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env, timeout=240
    )


# --- the name ------------------------------------------------------------------------------------------------------


def test_importing_twice_changes_nothing_and_the_modules_import_as_packages():
    import torch.tpu.compiler
    import torch.tpu.pallas
    from torch.tpu import EagerMode, Precision, precision  # noqa: F401
    from torch.tpu.compiler import custom_compiler_options  # noqa: F401

    from tpu_lab.backend import device

    before = torch.UntypedStorage.copy_
    device.register()
    assert torch.UntypedStorage.copy_ is before and sys.modules["torch.tpu"] is torch.tpu
    assert torch.device("tpu").type == "tpu" and tpu_lab.__version__


@pytest.mark.parametrize(
    "first",
    ["torch.utils.rename_privateuse1_backend('tpu')", "import sys, types; sys.modules['torch_tpu'] = types.ModuleType('torch_tpu')"
     "; torch.utils.rename_privateuse1_backend('tpu')"],
)  # fmt: skip
def test_another_owner_of_the_name_is_one_clear_error(first):
    done = child(f"import torch\n{first}\ntry:\n    import tpu_lab\nexcept RuntimeError as e:\n    print(e)")
    assert done.returncode == 0, done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
    assert ("torch_tpu" in done.stdout) == ("torch_tpu" in first)


@pytest.mark.parametrize(
    ("variable", "mode"),
    [("TORCH_TPU_DEFER_AND_FUSE", "DEFER_AND_FUSE"), ("TORCH_TPU_LAUNCH_BLOCKING", "DEFER_NEVER_AND_LAUNCH_BLOCKING")],
)
def test_the_environment_picks_the_start_mode(variable, mode):
    done = child("import torch, tpu_lab; print(torch.tpu.eager_mode.name)", **{variable: "1"})
    assert done.stdout.strip() == mode, done.stderr


# --- torch.tpu -----------------------------------------------------------------------------------------------------


def test_every_name_of_the_table_is_there_and_answers():
    assert [int(m) for m in (torch.tpu.EagerMode.DEFER_AND_FUSE, torch.tpu.EagerMode.DEFER_NEVER,
                             torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING)] == [0, 1, 2]  # fmt: skip
    assert torch.tpu.is_available() and torch.tpu.is_initialized() and torch.tpu.device_count() == 1
    assert torch.tpu.current_device() == 0 and torch.bfloat16 in torch.tpu.get_amp_supported_dtype()
    torch.tpu.set_device("tpu:0")
    with pytest.raises(RuntimeError, match="there is no tpu:3"):
        torch.tpu.set_device(3)
    with torch.tpu.device(0), torch.tpu.device_of(torch.ones(1, device="tpu")), torch.tpu.stream(torch.tpu.Stream()):
        torch.tpu.synchronize()
    assert torch.tpu.get_device_properties().total_memory > 0 and torch.tpu.get_device_name()
    begin, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    begin.record()
    torch.tpu.current_stream().record_event(end)
    assert begin.elapsed_time(end) >= 0 and end.query()
    torch.tpu.manual_seed(5)
    assert torch.tpu.initial_seed() == 5 and len(torch.tpu.default_generators) == 1


def test_a_mode_is_set_for_a_block_or_a_function_and_alone_it_warns():
    modes = torch.tpu.EagerMode

    @torch.tpu.set_eager_mode("fused")
    def deferred():
        return (torch.ones(3, device="tpu") + 1).untyped_storage()._tpu.value.__class__.__name__

    scope = torch.tpu.set_eager_mode(modes.DEFER_AND_FUSE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with scope, scope:
            pass
        del scope
    assert deferred() == deferred() == "Pending"
    with pytest.warns(UserWarning, match=r"alone changes nothing.*EagerMode\.DEFER_AND_FUSE` from now on") as told:
        torch.tpu.set_eager_mode("fused")
    assert told[0].filename == __file__
    with pytest.raises(ValueError, match="is no eager mode"):
        torch.tpu.set_eager_mode("fast")


def test_eager_mode_is_a_property_and_the_context_beats_it():
    assert torch.tpu.eager_mode is torch.tpu.EagerMode.DEFER_NEVER
    torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE
    try:
        x = torch.ones(3, device="tpu") * 2
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER):
            y = x + 1
        assert torch.tpu.eager_mode is torch.tpu.EagerMode.DEFER_AND_FUSE and y.tolist() == [3, 3, 3]
    finally:
        torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_NEVER
    with pytest.raises(ValueError, match="EagerMode"):
        torch.tpu.eager_mode = 7


def test_precision_takes_its_modes_and_torchs_switch():
    from tpu_lab.backend import precision

    with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        assert precision.level == "default"
        with torch.tpu.precision("HIGH"):
            assert precision.level == "high"
    assert precision.level == "highest"
    torch.set_float32_matmul_precision("medium")
    assert precision.level == "default"
    torch.set_float32_matmul_precision("highest")
    assert precision.level == "highest"
    with pytest.raises(ValueError, match="Precision.DEFAULT"), torch.tpu.precision("low"):
        pass


def test_compiler_options_hold_inside_their_block():
    from tpu_lab.backend import state

    with torch.tpu.compiler.custom_compiler_options({"xla_cpu_enable_fast_math": False}):
        assert (torch.ones(3, device="tpu") + 2).tolist() == [3, 3, 3]
        assert ("xla_cpu_enable_fast_math", False) in state.compiler_options
    assert state.compiler_options == ()
    torch.tpu.allow_excess_precision = False
    assert not torch.tpu.allow_excess_precision
    torch.tpu.allow_excess_precision = True
    assert torch.tpu.allow_excess_precision


def test_the_cache_counts_and_can_be_cleared():
    x = torch.ones(7, 3, device="tpu")
    torch.tpu._clear_cache()
    before = torch.tpu._get_cache_misses()
    x.tanh(), x.tanh()
    assert torch.tpu._get_cache_misses() == before + 1
    assert torch.tpu._get_cache_requests() == torch.tpu._get_cache_hits() + torch.tpu._get_cache_misses()
    assert isinstance(torch.tpu._get_cache_stats(), dict)
    torch.tpu._set_cache_only(True)
    try:
        with pytest.raises(Exception, match="cache"):
            torch.ones(7, 5, device="tpu").tanh()
    finally:
        torch.tpu._set_cache_only(False)


def test_jax_functions_become_ops_by_call_and_by_decorator():
    from jax.experimental import pallas as pl

    @torch.tpu.pallas.jax_op("test_device::scaled_gelu", donate_argnums=(0,))
    def scaled_gelu(x, scale: float = 1.0):
        return jax.nn.gelu(x) * scale

    def halves(a, b) -> tuple[jax.Array, jax.Array]:
        return a + b, a - b

    def doubled(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    both = torch.tpu.pallas.jax_op("test_device::halves", halves)
    double = torch.tpu.pallas.jax_op("test_device::doubled", doubled)
    host = torch.randn(8)
    x = host.to("tpu")
    torch.testing.assert_close(scaled_gelu(x, scale=3.0).cpu(), F.gelu(host, approximate="tanh") * 3)
    assert torch.equal(both(x, x)[0].cpu(), host * 2) and both(x, x)[1].abs().sum().item() == 0
    assert torch.equal(double(x).cpu(), host * 2)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        assert torch.equal((torch.ops.test_device.doubled(x) + 1).cpu(), host * 2 + 1)
    compiled = torch.compile(lambda t: double(t) + both(t, t)[0], backend="tpu")
    assert torch.equal(compiled(x).cpu(), host * 4)
    with pytest.raises(ValueError, match="namespace::op"):
        torch.tpu.pallas.jax_op("nothing", doubled)
    with pytest.raises(ValueError, match="not a tensor"):
        torch.tpu.pallas.jax_op("test_device::other", doubled, donate_argnums=4)
    wrong = torch.tpu.pallas.jax_op("test_device::wrong", lambda a: (a, a))
    with pytest.raises(TypeError, match="tuple"):
        wrong(x)


def test_torch_accelerator_works():
    current = torch.accelerator
    assert current.is_available() and current.current_accelerator().type == "tpu" and current.device_count() == 1
    gc.collect()
    before = current.memory_allocated()
    x = torch.zeros(1024, 256, device="tpu") + 1
    assert current.memory_allocated() - before >= x.nbytes <= current.max_memory_allocated("tpu:0")
    assert current.memory_stats()["allocated_bytes.all.current"] >= x.nbytes and current.memory_reserved() >= x.nbytes
    free, total = current.get_memory_info()
    assert 0 < free <= total
    assert torch.float32 in current.get_device_capability()["supported_dtypes"]
    for name in (
        "synchronize",
        "empty_cache",
        "empty_host_cache",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):
        getattr(current, name)()
    current.current_stream().synchronize()
    current.set_device_index(0)
    with current.device_index(0):
        assert current.current_device_index() == 0


# --- moves and numbers ---------------------------------------------------------------------------------------------


def test_tensors_and_modules_have_the_methods_of_the_device():
    x = torch.ones(2)
    assert x.tpu().is_tpu and not x.is_tpu and nn.Linear(2, 2).tpu().weight.is_tpu
    assert x.to(0).device == x.to("tpu").device == x.to("tpu:0").device == torch.device("tpu:0")
    assert x.to("tpu", non_blocking=True).is_tpu and nn.Linear(2, 2).to(0).weight.is_tpu


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).to(99), lambda: torch.ones(2).to("tpu:1"), lambda: torch.ones(2, device="tpu:1"),
        lambda: torch.tensor([1.0], device="tpu:1"), lambda: torch.empty(2, device=3), lambda: torch.rand(2, device="tpu:1"),
        lambda: torch.ones(2, device="tpu").to("tpu:1"), lambda: torch.arange(3, device="tpu:1"),
    ],
)  # fmt: skip
def test_another_index_is_an_error(make):
    with pytest.raises(RuntimeError, match=r"there is no tpu:\d+"):
        make()


def test_factories_take_everything_the_cpu_takes():
    array = np.arange(6.0).reshape(2, 3)
    for made in (torch.tensor(array, device="tpu"), torch.as_tensor(array, device="tpu"), torch.asarray(array, device="tpu"),
                 torch.from_numpy(array).to("tpu"), torch.tensor(array.tolist(), dtype=torch.float64, device="tpu")):  # fmt: skip
        assert made.is_tpu and np.array_equal(made.cpu().numpy(), array)
    with torch.device("tpu"):
        assert torch.zeros(2).is_tpu and nn.Linear(2, 2).weight.is_tpu
    assert torch.tensor([torch.ones((), device="tpu") * 2]).tolist() == [2.0]


def test_python_reads_a_tensor_as_it_reads_one_on_the_cpu():
    host = torch.tensor([0.0, 1.5, -2.0])
    x = host.to("tpu")
    assert x.tolist() == host.tolist() and len(x) == 3 and [v.item() for v in x] == host.tolist()
    assert (bool(x[1]), int(x[1]), float(x[1]), complex(x[1])) == (True, 1, 1.5, 1.5 + 0j)
    assert f"{x[1]:.2f}" == "1.50" and 1.5 in x and 9.0 not in x and ["a", "b"][x[0].long()] == "a"
    assert repr(x) == repr(host).replace("])", "], device='tpu:0')")
    for call in (x.numpy, lambda: np.asarray(x), lambda: x.requires_grad_().sum().numpy()):
        with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
            call()


def test_ipython_shows_a_tensor():
    from IPython.lib.pretty import pretty

    assert pretty(torch.ones(2, device="tpu")) == "tensor([1., 1.], device='tpu:0')"


def test_channels_last_strides_are_those_of_the_cpu():
    host = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    x, conv = host.to("tpu"), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    expected = conv(host)
    for f in (
        lambda t: t,
        lambda t: t + 1,
        F.relu,
        lambda t: t.contiguous(),
        lambda t: t.permute(0, 2, 3, 1),
        lambda t: t.clone(),
    ):
        assert f(x).stride() == f(host).stride()
    out = conv.tpu()(x)
    assert conv.weight.stride() == (27, 1, 9, 3)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_agree_with_the_cpu(kind):
    torch.manual_seed(0)
    layer, x = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 3, 3)
    out, _ = layer(x)
    out.square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    there, _ = layer.to("tpu")(x.to("tpu"))
    there.square().sum().backward()
    torch.testing.assert_close(there.cpu(), out, rtol=1e-4, atol=1e-5)
    for p, g in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad.cpu(), g, rtol=1e-3, atol=1e-4)


# --- processes, threads, memory ------------------------------------------------------------------------------------


class OnDevice(Dataset):
    """A dataset that makes the mistake of using the device in a worker."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.ones(2, device="tpu") + i


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_workers_serve_cpu_tensors_and_pinning_is_the_identity():
    (torch.ones(2, device="tpu") + 1).sum().item()  # the device has started
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2, pin_memory=True)
    assert [b.to("tpu", non_blocking=True).sum().item() for (b,) in loader] == [1, 5, 9, 13]
    x = torch.ones(3)
    assert x.pin_memory() is x
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(3, device="tpu").pin_memory()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_the_device_in_a_forked_worker_is_a_clear_error():
    (torch.ones(2, device="tpu") + 1).sum().item()
    with pytest.raises(RuntimeError, match="forked child process"):
        list(DataLoader(OnDevice(), num_workers=1))
    assert not torch.tpu._is_in_bad_fork() and (torch.ones(2, device="tpu") + 1).sum().item() == 4


@pytest.mark.parametrize("mode", [torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE])
def test_four_threads_get_right_results(mode):
    found = {}

    def work(i):
        with torch.tpu.set_eager_mode(mode):
            for _ in range(10):
                x = torch.full((4, 4), 0.1 * i, device="tpu", requires_grad=True)
                (x @ x).tanh().sum().backward()
            found[i] = x.grad.cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        x = torch.full((4, 4), 0.1 * i, requires_grad=True)
        (x @ x).tanh().sum().backward()
        torch.testing.assert_close(found[i], x.grad)


def test_many_ops_and_steps_leave_memory_flat():
    x = torch.ones(4, 4, device="tpu")
    for _ in range(3):
        (x * 1.5).sum()
    before = len(jax.live_arrays())
    for _ in range(2000):
        (x * 1.5).sum()
    assert len(jax.live_arrays()) <= before + 2
    model = nn.Linear(4, 4).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def steps(n):
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            for _ in range(n):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

    steps(10)
    before = len(jax.live_arrays())
    steps(300)
    assert len(jax.live_arrays()) <= before + 2
