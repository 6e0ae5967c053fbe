"""Ops of other libraries: a kernel for the CPU, an autograd formula, a fake kernel, as torchvision's are. And torchvision."""

import itertools
import warnings

import pytest
import torch

import tpu_lab
from tpu_lab import advice
from tpu_lab.backend import fallback, registry
from tpu_lab.metrics import Metrics

MODES = ("strict", "debug", "fused", "compiled")


def crops(x, boxes, size=2):
    """C++-like: mean of each box (rows a..b of x), of float32 and float64 only."""
    if x.dtype != boxes.dtype:
        raise RuntimeError("expected x and boxes to have the same type")
    if x.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"\"crops\" not implemented for '{'Half' if x.dtype is torch.float16 else 'BFloat16'}'")
    spans = [x[int(a) : int(b)] for a, b in boxes.tolist()]
    made = [s.mean(0, keepdim=True).expand(size, -1) for s in spans]
    return torch.stack(made) if made else x.new_zeros(0, size, x.shape[1]), torch.tensor([len(s) for s in spans])


def crops_backward(grad, boxes, lengths, rows):
    if grad.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError("\"crops_backward\" not implemented for 'BFloat16'")
    out = grad.new_zeros(rows, grad.shape[2])
    for g, (a, b), n in zip(grad, boxes.tolist(), lengths.tolist(), strict=True):
        out[int(a) : int(b)] += g.sum(0) / n
    return out


def keep(scores, least):
    """As many as the values say: no shape before they are known."""
    return (scores > least).nonzero()[:, 0]


@pytest.fixture(scope="module")
def others():
    """The ops of a library that knows nothing of "tpu"."""
    library = torch.library.Library("lab_others", "DEF")
    library.define("crops(Tensor x, Tensor boxes, int size=2) -> (Tensor, Tensor)")
    library.define("crops_backward(Tensor grad, Tensor boxes, Tensor lengths, int rows) -> Tensor")
    library.define("keep(Tensor scores, float least) -> Tensor")
    library.define("grow_(Tensor(a!)[] xs, float by) -> ()")
    library.define("cube(Tensor x) -> Tensor")
    library.impl("crops", crops, "CPU")
    library.impl("crops_backward", crops_backward, "CPU")
    library.impl("keep", keep, "CPU")
    library.impl("grow_", lambda xs, by: [x.add_(by) for x in xs] and None, "CPU")
    library.impl("cube", lambda x: x**3, "CPU")

    @torch.library.register_fake("lab_others::crops", lib=library)
    def _(x, boxes, size=2):
        return x.new_empty(boxes.shape[0], size, x.shape[1]), boxes.new_empty(boxes.shape[0], dtype=torch.long)

    @torch.library.register_fake("lab_others::crops_backward", lib=library)
    def _(grad, boxes, lengths, rows):
        return grad.new_empty(rows, grad.shape[2])

    @torch.library.register_fake("lab_others::cube", lib=library)
    def _(x):
        return torch.empty_like(x)

    ops = torch.ops.lab_others

    def setup(ctx, inputs, output):
        ctx.save_for_backward(inputs[1], output[1])
        ctx.rows = inputs[0].shape[0]
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, _):
        return ops.crops_backward(grad, *ctx.saved_tensors, ctx.rows), None, None

    torch.library.register_autograd("lab_others::crops", backward, setup_context=setup, lib=library)
    yield ops
    library._destroy()


@pytest.fixture(autouse=True)
def as_new(monkeypatch):
    """Nobody has been told of any op."""
    monkeypatch.setattr(fallback, "_warned", set())


BOXES = torch.tensor([[0.0, 2.0], [1.0, 4.0], [3.0, 5.0]])


def step(device, dtype, boxes, how="strict"):
    """(crops, gradient of x, the kept rows) of a small program around the library's ops, on the CPU."""
    ops = torch.ops.lab_others

    def around(x, boxes):
        made, _ = ops.crops(x * 2, boxes)
        return made.sin() + 1

    if how == "compiled":
        torch._dynamo.reset()
        around = torch.compile(around, backend="tpu", fullgraph=True)
    x = torch.linspace(-1, 1, 15, dtype=dtype).reshape(5, 3).to(device).requires_grad_()
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode({"fused": 0, "debug": 2}.get(how, 1))):
        made = around(x, boxes.to(device, dtype))
        (grad,) = torch.autograd.grad((made * made).sum(), x)
        kept = ops.keep(made.detach().flatten(), 0.9)
        assert {made.device.type, grad.device.type, kept.device.type} == {device}
        return made.detach().cpu(), grad.cpu(), kept.cpu()


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
@pytest.mark.parametrize("boxes", [BOXES, BOXES[:0]], ids=["boxes", "none"])
@pytest.mark.parametrize("how", MODES)
def test_their_cpu_kernels_serve_the_device_with_gradients(others, how, boxes):
    for got, want in zip(step("tpu", torch.float32, boxes, how), step("cpu", torch.float32, boxes), strict=True):
        torch.testing.assert_close(got, want)


def test_each_is_told_once_and_stands_in_the_trace(others):
    with tpu_lab.profile() as p, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            step("tpu", torch.float32, BOXES)
    told = [str(w.message).partition(" ")[0] for w in told if issubclass(w.category, tpu_lab.FallbackWarning)]
    assert told == ["lab_others::crops", "lab_others::crops_backward", "lab_others::keep"]
    own = [op.name for op in p.trace.ops if op.fallback]
    assert sorted(own) == sorted(2 * [f"lab_others.{name}.default" for name in ("crops", "crops_backward", "keep")])
    (found,) = (f for f in advice.findings(Metrics(p.trace), limit=9) if f.kind == "fallback")
    assert "lab_others" in found.act and found.file == __file__


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_lists_that_they_write_are_written(others):
    x = torch.zeros(2, 3, device="tpu")
    others.grow_([x[0], x[:, 2]][:1], 2.5)
    assert x.tolist() == [[2.5, 2.5, 2.5], [0, 0, 0]]


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_that_their_cpu_kernels_lack_are_computed_in_float32(others, dtype):
    made, grad, _ = step("tpu", dtype, BOXES)
    want, slope, _ = step("cpu", torch.float32, BOXES)
    assert made.dtype == grad.dtype == dtype
    torch.testing.assert_close(made.float(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad.float(), slope, rtol=5e-2, atol=5e-2)
    with pytest.raises(RuntimeError, match="same type"):  # the library's own words
        others.crops(made[0].to("tpu"), BOXES.to("tpu"))


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_under_autocast_they_get_float32(others):
    x, weight = torch.rand(5, 4, device="tpu", requires_grad=True), torch.rand(4, 3, device="tpu")
    with torch.autocast("tpu"):
        features = x @ weight
        made, _ = others.crops(features, BOXES.to("tpu"))
    assert features.dtype == torch.bfloat16 and made.dtype == torch.float32
    made.sum().backward()
    want = x.detach().cpu().requires_grad_()
    torch.ops.lab_others.crops(want @ weight.cpu(), BOXES)[0].sum().backward()
    torch.testing.assert_close(x.grad.cpu(), want.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_a_lowering_may_come_at_any_time(others):
    def run():
        with tpu_lab.profile(mode="fused") as p:
            value = (others.cube(x) + 1).cpu()
        return value.tolist(), [op.fallback for op in p.trace.ops if "cube" in op.name], len(p.trace.launches)

    x = torch.tensor([1.0, 2.0], device="tpu")
    assert run()[:2] == ([2, 9], [True])
    try:
        registry.op(others.cube)(lambda x: x * x * x)
        assert run() == ([2, 9], [False], 1)
        registry.op(others.cube)(lambda x: x * 10)  # written again: what ran before is forgotten
        assert run() == ([11, 21], [False], 1)
        compiled = torch.compile(lambda x: others.cube(x) + 1, backend="tpu", fullgraph=True)
        with tpu_lab.profile() as p:
            assert compiled(x).tolist() == [11, 21]
        assert not any(op.fallback for op in p.trace.ops)
    finally:
        registry._table.pop(others.cube.default)


def test_a_lowering_goes_before_a_custom_op_s_own_function():
    @torch.library.custom_op("lab_others_too::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    half.register_fake(torch.empty_like)
    half.register_autograd(lambda ctx, grad: grad / 2)
    x = torch.tensor([3.0], device="tpu", requires_grad=True)
    assert half(x).item() == 1.5
    registry.op(torch.ops.lab_others_too.half)(lambda x: x * 0.5 + 1)  # not quite: so it can be told apart
    with tpu_lab.profile() as p:
        assert half(x).item() == 2.5
    assert [op.name for op in p.trace.ops if op.kind != "host"][:1] == ["lab_others_too.half.default"]
    half(x).backward()
    assert x.grad.item() == 0.5 and half(x.detach().cpu()).item() == 1.5


# --- torchvision, where it works: its wheels want the CUDA libraries they were built for -----------------------------------


@pytest.fixture(scope="module")
def vision():
    """torchvision.ops; a skip that says what torchvision says where it cannot be imported or finds no kernels."""
    try:
        from torchvision import extension, ops

        extension._assert_has_ops()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision does not work here: {str(error).partition('. ')[0]}")
    return ops


def rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


CORNERS = rand(9, 2) * 12
ROIS = torch.cat([(torch.arange(9) % 2).float()[:, None], CORNERS, CORNERS + rand(9, 2) * 8 + 1], 1)
VISION = {
    "nms": lambda v, x, r: v.nms(r[:, 1:], r[:, 1], 0.3),
    "batched_nms": lambda v, x, r: v.batched_nms(r[:, 1:], r[:, 1], r[:, 0].long(), 0.3),
    "roi_align": lambda v, x, r: v.roi_align(x, r, (2, 2)),
    "roi_align aligned": lambda v, x, r: v.roi_align(x, r, (2, 2), 0.5, 2, True),
    "roi_pool": lambda v, x, r: v.roi_pool(x, r, (2, 2)),
    "ps_roi_align": lambda v, x, r: v.ps_roi_align(x, r, (2, 2), 1.0, 2),
    "ps_roi_pool": lambda v, x, r: v.ps_roi_pool(x, r, (2, 2)),
    "deform_conv2d": lambda v, x, r: v.deform_conv2d(x, x.repeat(1, 3, 1, 1)[:, :18, 1:-1, 1:-1], x[:, :4, :3, :3].repeat(2, 2, 1, 1), mask=x.repeat(1, 2, 1, 1)[:, :9, 1:-1, 1:-1]),
    "box_iou": lambda v, x, r: v.box_iou(r[:, 1:], r[:, 1:].flip(0)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_ops_of_torchvision(vision, mode):
    def run(call, device, rois):
        x = rand(2, 8, 12, 12).to(device).requires_grad_()
        out = call(vision, x, rois.to(device))
        assert out.device.type == device
        grads = torch.autograd.grad((out * out).sum(), x) if out.requires_grad else ()
        return [out.detach().cpu(), *(g.cpu() for g in grads)]

    for (name, call), rois in itertools.product(VISION.items(), (ROIS, ROIS[:0])):
        want = run(call, "cpu", rois)
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode(mode == "strict")):
            torch.testing.assert_close(run(call, "tpu", rois), want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_a_detector_of_torchvision_finds_and_learns_what_it_does_on_the_cpu(vision):
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    def run(device):
        torch.manual_seed(0)
        backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 8, 1), torch.nn.ReLU())
        backbone.out_channels = 8
        every = {f"{part}_{what}": n for part in ("rpn", "box") for what, n in (("batch_size_per_image", 10**6), ("positive_fraction", 1.0))}
        model = FasterRCNN(
            backbone, 3, 64, 80, rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)), rpn_post_nms_top_n_train=20,
            rpn_post_nms_top_n_test=20, box_detections_per_img=5, box_score_thresh=0.0, box_roi_pool=vision.MultiScaleRoIAlign(["0"], 2, 2),
            box_head=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 1024)), **every,
        ).to(device)  # fmt: skip
        images = [rand(3, 50, 60).to(device), rand(3, 64, 40).to(device)]
        targets = [{"boxes": ROIS[:n, 1:].to(device), "labels": torch.ones(n, dtype=torch.long, device=device)} for n in (2, 0)]
        losses = model(images, targets)
        sum(losses.values()).backward()
        found = model.eval()(images)
        assert {t.device.type for one in found for t in one.values()} == {device}
        return {
            "losses": [v.detach().cpu() for v in losses.values()], "slopes": [p.grad.cpu() for p in model.parameters()],
            "found": [t.detach().cpu() for one in found for t in one.values()],
        }  # fmt: skip

    want = run("cpu")
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        torch.testing.assert_close(run("tpu"), want, rtol=1e-4, atol=1e-5)
