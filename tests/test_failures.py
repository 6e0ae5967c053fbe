"""An op that cannot run fails at its own line, in its own words, and stands in nobody else's way."""

import pytest
import torch
from test_graph import recorded

import tpu_lab
from tpu_lab.backend import dispatch, executor, fallback
from tpu_lab.backend.cache import cache

FUSED = torch.tpu.EagerMode.DEFER_AND_FUSE
HOST_OPS = {
    "frexp": lambda w: torch.frexp(w).mantissa,
    "erfcx": torch.special.erfcx,
    "igamma": lambda w: torch.igamma(w, w),
    "lstsq": lambda w: torch.linalg.lstsq(torch.diag(w), torch.diag(w)).solution,
    "geqrf": lambda w: torch.geqrf(torch.diag(w)).tau,
}


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
@pytest.mark.parametrize("mode", [torch.tpu.EagerMode.DEFER_NEVER, FUSED])
@pytest.mark.parametrize("name", HOST_OPS)
def test_an_op_without_a_lowering_runs_on_the_cpu_in_every_mode(name, mode):
    with torch.tpu.set_eager_mode(mode):
        got = HOST_OPS[name](torch.ones(3, device="tpu") * 2).cpu()
    torch.testing.assert_close(got, HOST_OPS[name](torch.ones(3) * 2))


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_one_call_that_cannot_be_traced_sends_no_other_call_to_the_cpu(mode, monkeypatch):
    record = dispatch.record_of(torch.ops.aten.isin.Tensor_Scalar_out)  # a structured op arrives as this
    assert record.lowering is None and record.decompose is not None
    real, tried = record.decompose, []

    def decompose(args, kwargs, outputs):
        tried.append(args[0].dtype.name)
        if args[0].dtype == "int16":
            raise NotImplementedError("not for this one")
        return real(args, kwargs, outputs)

    def run():
        return [torch.isin(torch.tensor([1, 7], dtype=dtype).to("tpu"), 7) for dtype in dtypes]

    dtypes = [torch.int16, torch.int32, torch.int16, torch.int32, torch.int64]
    monkeypatch.setattr(record, "decompose", decompose)
    dispatch.clear()
    with torch.tpu.set_eager_mode(mode):
        out, t = recorded(run)
    ran = [(op.inputs[0], op.fallback) for op in t.ops if op.name.startswith("aten.isin")]
    assert ran == [("i16[2]", True), ("i32[2]", False), ("i16[2]", True), ("i32[2]", False), ("i64[2]", False)]
    assert tried.count("int16") == 1 and [o.tolist() for o in out] == [[False, True]] * 5
    with torch.tpu.set_eager_mode(mode):  # and if its signature is forgotten: it is still known
        assert torch.isin(torch.tensor([[7]], dtype=torch.int16).to("tpu"), 7).item() and tried.count("int16") == 2
    fallback.untraced.clear()


def test_a_wrong_op_raises_at_its_call_and_others_go_on():
    with torch.tpu.set_eager_mode(FUSED):
        w = torch.ones(3, device="tpu")
        w.mul_(2)
        with pytest.raises(RuntimeError, match="reduction dim"):
            torch.zeros(0, 3, device="tpu").max()
        assert w.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "call",
    [torch.linalg.cholesky, torch.linalg.qr, torch.linalg.svdvals, torch.linalg.eigh, torch.linalg.det, torch.linalg.lu, torch.geqrf,
     lambda h: torch.linalg.lstsq(h, h), lambda h: h.int().logcumsumexp(0)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_that_xla_has_no_algorithm_for_is_refused_at_the_call(call, dtype):
    """Not where the graph is compiled: there it would take all that was deferred with it."""
    h = torch.eye(2, dtype=dtype).to("tpu")
    with torch.tpu.set_eager_mode(FUSED):
        w = torch.ones(3, device="tpu") * 2
        with pytest.raises(RuntimeError, match="not implemented for|types other than float"):
            call(h)
        assert w.tolist() == [2.0, 2.0, 2.0]


def test_a_graph_that_fails_twice_is_dropped(monkeypatch):
    real, failing = cache.add, [True, True]

    def add(*args, **kwargs):
        if failing:
            failing.pop()
            raise ValueError("no program today")
        return real(*args, **kwargs)

    monkeypatch.setattr(cache, "add", add)
    with torch.tpu.set_eager_mode(FUSED):
        lost = torch.ones(3, device="tpu") * 1.2345
        for _ in range(2):
            with pytest.raises(ValueError, match="no program today"):
                lost.tolist()
        with pytest.raises(RuntimeError, match="value was lost"):
            lost.tolist()
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2.0, 2.0]
    assert not executor.graph.nodes


def test_numbers_that_the_cpu_refuses_or_ignores():
    with pytest.raises(RuntimeError, match="Integers to negative integer powers"):
        torch.tensor([2], device="tpu") ** -1
    a = torch.ones(2, 3, device="tpu")
    out = torch.addmm(torch.ones(2, 2, device="tpu"), a, a.t() * float("inf"), alpha=0)
    assert out.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_profile_runs_what_its_block_deferred():
    with torch.tpu.set_eager_mode(FUSED), tpu_lab.profile() as p:
        y = torch.ones(8, 8, device="tpu") @ torch.ones(8, 8, device="tpu")
    assert [len(r.ops) for r in p.trace.launches] == [3]
    assert y.sum().item() == 512.0


def test_the_profiler_object_stands_for_its_profile():
    p = tpu_lab.profile()
    with pytest.raises(AttributeError, match="before its block has run"):
        _ = p.trace
    with p:
        torch.ones(2, device="tpu") + 1
    assert len(p.trace.ops) == 2 and "2 ops run as 2 launches" in repr(p)
