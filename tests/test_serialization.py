"""Saving, loading, copying and moving: storages, checkpoints, modules with tied weights. CPU PyTorch is the truth."""

import copy
import io
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import tpu_lab  # noqa: F401


def roundtrip(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


def sample(dtype):
    return (torch.arange(12) - 3).reshape(3, 4).to(dtype)


def test_a_storage_can_be_made_by_size_or_bytes_and_holds_what_is_put_in():
    storage = torch.UntypedStorage(16, device="tpu")
    assert storage.nbytes() == 16 and storage.device == torch.device("tpu:0") and storage.is_tpu
    filled = torch.empty(0, device="tpu").set_(storage, 0, (4,), (1,)).fill_(1.5)
    assert torch.equal(filled.cpu(), torch.full((4,), 1.5))
    assert torch.UntypedStorage([1, 2, 3], device="tpu").tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="there is no tpu:1"):
        torch.UntypedStorage(16, device="tpu:1")


def test_storage_methods_agree_with_the_cpu():
    x = sample(torch.float32)
    here, there = x.clone().untyped_storage(), x.to("tpu").untyped_storage()
    assert there.tolist() == here.tolist() and there.cpu().tolist() == here.tolist()
    assert here.tpu().tolist() == here.tolist() and here.tpu().device.type == "tpu"
    here[3], there[3] = 7, 7
    assert there.tolist() == here.tolist() and there[3] == 7
    copied = there.clone()
    there.fill_(0)
    assert sum(there.tolist()) == 0 and copied.tolist() == here.tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_save_and_load_keep_values_dtype_and_device(dtype):
    x = sample(dtype)
    back = roundtrip(x.to("tpu"), weights_only=True)
    assert back.device.type == "tpu" and back.dtype is dtype
    assert torch.equal(
        back.cpu().view(torch.uint8) if dtype.itemsize == 1 else back.cpu(),
        x.view(torch.uint8) if dtype.itemsize == 1 else x,
    )


def test_map_location_works_both_ways():
    x = sample(torch.float32)
    to_cpu = roundtrip(x.to("tpu"), map_location="cpu", weights_only=True)
    to_tpu = roundtrip(x, map_location="tpu", weights_only=True)
    by_device = roundtrip(x, map_location=torch.device("tpu"), weights_only=True)
    assert to_cpu.device.type == "cpu" and torch.equal(to_cpu, x)
    assert to_tpu.device.type == by_device.device.type == "tpu"
    assert torch.equal(to_tpu.cpu(), x) and torch.equal((by_device + 1).cpu(), x + 1)


def test_views_stay_views_of_one_storage_through_a_file():
    x = sample(torch.float32).to("tpu")
    loaded = roundtrip({"whole": x, "row": x[1], "turned": x.t()}, weights_only=True)
    loaded["row"].fill_(9)
    assert torch.equal(loaded["whole"].cpu()[1], torch.full((4,), 9.0))
    assert loaded["turned"].stride() == (1, 4) and torch.equal(loaded["turned"].cpu(), loaded["whole"].cpu().t())
    assert torch.equal(x.cpu(), sample(torch.float32))


def test_pickle_copy_and_deepcopy_are_independent_copies():
    x = sample(torch.float32).to("tpu")
    for made in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert made.device == x.device and made.data_ptr() != x.data_ptr()
        made.zero_()
    shallow = copy.copy(x)
    shallow[0, 0] = 50
    assert x[0, 0].item() == 50 and torch.equal(x.cpu()[1:], sample(torch.float32)[1:])
    pair = copy.deepcopy([x, x[0]])
    pair[1].fill_(4)
    assert torch.equal(pair[0][0].cpu(), torch.full((4,), 4.0)) and x[0, 0].item() == 50


def test_deepcopy_of_a_model_and_its_optimizer_trains_like_the_original():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to("tpu")
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3).to("tpu")
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        m(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(model.weight.cpu(), twin.weight.cpu()) and model.weight is not twin.weight


def test_a_checkpoint_from_tpu_opens_without_tpu_lab(tmp_path):
    path, x = tmp_path / "c.pt", sample(torch.float32)
    model = nn.Linear(4, 2)
    torch.save({"x": x.to("tpu"), "model": copy.deepcopy(model).to("tpu").state_dict()}, path)
    np.save(tmp_path / "w.npy", model.weight.detach().numpy())
    code = (
        "import sys, numpy, torch\n"
        f"c = torch.load({str(path)!r}, map_location='cpu', weights_only=True)\n"
        f"assert numpy.array_equal(c['model']['weight'].numpy(), numpy.load({str(tmp_path / 'w.npy')!r}))\n"
        "assert 'tpu_lab' not in sys.modules\n"
        "print(c['x'].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == x.sum().item()


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_both_ways(assign):
    torch.manual_seed(1)
    source, target = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("tpu"),
    )
    there = source.state_dict() if not assign else {k: v.to("tpu") for k, v in source.state_dict().items()}
    target.load_state_dict(there, assign=assign)
    back = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    back.load_state_dict({k: v.cpu() for k, v in target.state_dict().items()}, assign=assign)
    for name, value in source.state_dict().items():
        assert torch.equal(back.state_dict()[name], value) and target.state_dict()[name].device.type == "tpu"


def test_tied_weights_stay_tied_with_their_gradient_and_the_optimizer_goes_on():
    torch.manual_seed(2)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    weight, optimizer = model["embed"].weight, torch.optim.SGD(model.parameters(), 0.1)
    weight.tag = "mine"
    model["head"](model["embed"](torch.tensor([1]))).sum().backward()
    expected, start = weight.grad.clone(), weight.detach().clone()
    model.to("tpu")
    assert (
        model["head"].weight is model["embed"].weight is weight and weight.device.type == "tpu" and weight.tag == "mine"
    )
    assert weight.grad.device.type == "tpu" and torch.equal(weight.grad.cpu(), expected)
    optimizer.step()
    model.cpu()
    assert model["head"].weight is model["embed"].weight is weight and weight.device.type == "cpu"
    torch.testing.assert_close(weight.detach(), start - 0.1 * expected)


def test_tied_weights_stay_tied_when_the_object_cannot_be_kept():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    held = weakref.ref(model["a"].weight)  # torch.utils.swap_tensors refuses this
    old = held()
    model.to("tpu")
    assert model["a"].weight is model["b"].weight and model["a"].weight is not old
    assert torch.equal(model["a"].weight.cpu(), old)


def test_lstm_parameters_and_meta_modules_move_too():
    lstm = nn.LSTM(3, 4)
    before = list(lstm.parameters())
    lstm.tpu()
    assert all(a is b for a, b in zip(before, lstm.parameters(), strict=True))
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    assert empty.to_empty(device="tpu").weight.device.type == "tpu"
    assert nn.Linear(2, 2).tpu().to(torch.float16).weight.dtype is torch.float16


def test_tpu_tensors_do_not_travel_to_other_processes():
    from multiprocessing.reduction import ForkingPickler

    with pytest.raises(RuntimeError, match=r"x\.cpu\(\)"):
        ForkingPickler.dumps(torch.ones(3, device="tpu"))


def test_dlpack_never_hands_out_an_address():
    x = torch.ones(3, device="tpu")
    for export in (
        torch.utils.dlpack.to_dlpack,
        torch.to_dlpack,
        torch.Tensor.__dlpack__,
        torch.Tensor.__dlpack_device__,
    ):
        with pytest.raises(BufferError, match="DLPack"):
            export(x)
    assert torch.equal(torch.from_dlpack(torch.ones(3)), torch.ones(3))


def test_deepcopy_of_scalars_and_of_batch_norm():
    # a 0-dim tensor's stride is the schema's default, so torch's call of set_ leaves it out
    scalar = torch.tensor(7, device="tpu")
    assert copy.deepcopy(scalar).item() == 7
    norm = torch.nn.BatchNorm1d(3).to("tpu")
    norm(torch.randn(4, 3, device="tpu"))
    twin = copy.deepcopy(norm)
    for mine, theirs in zip(twin.state_dict().values(), norm.state_dict().values(), strict=True):
        assert mine.device.type == "tpu"
        assert torch.equal(mine, theirs)
    norm.num_batches_tracked.add_(1)
    assert twin.num_batches_tracked.item() == 1
