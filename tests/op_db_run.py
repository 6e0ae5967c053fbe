"""One sample of PyTorch's op database on the CPU and on the device: the call in each of its forms, and the outcomes.

A form is a way to call an op: "forward", "inplace", "out", "backward", "double". Inputs keep their strides and offsets
on the device: a tensor that is a window of a bigger one is moved with all of its storage.
"""

from __future__ import annotations

import contextlib
import signal
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from op_db_compare import WIDER, as_right, differs, narrowed, same_strides
from torch.utils import _pytree as tree

FORMS = ("forward", "inplace", "out", "backward", "double")
LIMIT = 30  # seconds of processor time a call may take
# Their tensor of places must be on the CPU, PyTorch says.
STAYS = {"tensor_split": 1}
# Each vector may come with another sign or phase; PyTorch's own process of the result takes it out.
SIGNS = {"linalg.eigh", "linalg.eig", "linalg.svd", "svd"}
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


@dataclass(frozen=True)
class Failure:
    """One sample of one form that is not as on the CPU."""

    entry: str
    dtype: str
    form: str
    mode: str
    sample: int
    kind: str  # values, dtype, shape, strides, structure, type, mutation, error (raised), silent (should have raised)
    text: str
    call: str

    def __str__(self) -> str:
        return f"{self.entry} {self.dtype} {self.form} ({self.mode}) sample {self.sample}: {self.text}\n    {self.call}"


@dataclass
class Outcome:
    """What a call gave, or the error it raised; the new values of arguments it wrote."""

    value: object = None
    error: Exception | None = None
    written: tuple = ()
    random: bool = False


class Mover:
    """Copies of a sample's values for one run, on the CPU or on the device. Tensors on one storage stay on one."""

    def __init__(self, device: str, wide=False):
        self.device, self.wide, self.flats, self.tensors = device, wide, {}, []

    def __call__(self, value):
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            made = [self(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        if isinstance(value, dict):
            return {k: self(v) for k, v in value.items()}
        if self.device != "cpu" and (value == "cpu" if isinstance(value, str) else value == torch.device("cpu")):
            return self.device
        if self.wide and value in WIDER:
            return WIDER[value]
        return value

    def tensor(self, t):
        if t.layout != torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_quantized:
            made = t.detach().clone().to(self.device)
        else:
            made = self._window(t.detach())
        if self.wide and made.dtype in WIDER:
            made = made.to(WIDER[made.dtype])
        made.requires_grad_(t.requires_grad)
        self.tensors.append((made, made._version))
        return made

    def _window(self, t):
        if t.is_conj():
            return self._window(t.conj()).conj()
        if t.is_neg():
            return torch._neg_view(self._window(torch._neg_view(t)))
        storage = t.untyped_storage()
        key = (storage._cdata, t.dtype)
        if key not in self.flats:
            flat = torch.empty((0,), dtype=t.dtype).set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))
            self.flats[key] = flat.clone().to(self.device)
        return self.flats[key].as_strided(t.shape, t.stride(), t.storage_offset())


class TooSlow(Exception):
    """A call took more than LIMIT seconds."""


@contextlib.contextmanager
def limited():
    def stop(*_):
        raise TooSlow(f"not done after {LIMIT} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(call, sample, device: str, stays=0, wide=False, wait=True) -> Outcome:
    """call(sample's input, args, kwargs, process, device) on copies of the sample's values.

    stays: its args stay on the CPU; wide: half types become float32; wait: for the device, which may find an error.
    """
    move = Mover(device, wide)
    torch.default_generator.manual_seed(7)
    torch.tpu.manual_seed(7)
    before = torch.get_rng_state() if device == "cpu" else None
    outcome = Outcome()
    with warnings.catch_warnings(), limited():
        warnings.simplefilter("ignore")
        try:
            inputs, kwargs = move(sample.input), move(sample.kwargs)
            args = Mover("cpu", wide)(sample.args) if stays else move(sample.args)
            outcome.value = call(inputs, args, kwargs, sample.output_process_fn_grad, device)
            if device == "tpu" and wait:
                torch.tpu.synchronize()
        except Exception as error:
            outcome.error = error
    if device == "cpu":
        outcome.random = not torch.equal(before, torch.get_rng_state())
    outcome.written = tuple(t.detach() for t, version in move.tensors if t._version > version)
    return outcome


def forward(op):
    def call(value, args, kwargs, process, device):
        with torch.no_grad():
            return op(value, *args, **kwargs)

    return call


def inplace(op):
    def call(value, args, kwargs, process, device):
        with torch.no_grad():
            result = op.get_inplace()(value, *args, **kwargs)
        return result, result is value

    return call


class Written(NamedTuple):
    """What `out=` holds, and whether the call gave these very tensors. Their strides are the caller's."""

    outs: list
    given: list


def _results(value):
    return tuple(value.outs) if isinstance(value, Written) else value


def out(op, shape=None):
    """With `out=`: of the right shape, or of another one, which PyTorch resizes (and warns)."""

    def call(value, args, kwargs, process, device):
        with torch.no_grad():
            like = op(value, *args, **kwargs)
            many = isinstance(like, (tuple, list))
            tensors = list(like) if many else [like]
            if not all(isinstance(t, torch.Tensor) for t in tensors):
                return None
            outs = [torch.empty_like(t) if shape is None else torch.empty(shape, dtype=t.dtype, device=device) for t in tensors]
            result = op(value, *args, **kwargs, out=tuple(outs) if many else outs[0])
            results = list(result) if many else [result]
            return Written(outs, [r is o for r, o in zip(results, outs)])

    return call


def _gradients(op, double):
    def call(value, args, kwargs, process, device):
        leaves = [t for t in tree.tree_leaves((value, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        result = process(op(value, *args, **kwargs))
        outs = [t for t in tree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outs or not leaves:
            return None
        given = [_like(t, i, device) for i, t in enumerate(outs)]
        if not double:
            return torch.autograd.grad(outs, leaves, given, allow_unused=True)
        given = [g.requires_grad_() for g in given]
        firsts = torch.autograd.grad(outs, leaves, given, allow_unused=True, create_graph=True)
        firsts = [g for g in firsts if g is not None and g.requires_grad]
        if not firsts:
            return None
        return torch.autograd.grad(
            firsts, [*leaves, *given], [_like(t, i, device) for i, t in enumerate(firsts)], allow_unused=True
        )

    return call


def backward(op):
    return _gradients(op, False)


def double(op):
    return _gradients(op, True)


def _like(t, seed, device):
    """A gradient to start from: the same numbers on both sides."""
    made = torch.randn(t.shape, dtype=torch.complex128 if t.is_complex() else torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.to(t.dtype).to(device)


def judged(name, call, sample, want: Outcome, got: Outcome, stays=0) -> tuple[str, str] | None:
    """(kind, text) of what differs between the CPU's outcome and the device's; None if nothing does."""
    if want.error is not None:
        return raised_as(got, type(want.error), str(want.error))
    if got.error is not None:
        return "error", f"error: {type(got.error).__name__}: {str(got.error)[:600]}"
    values = not want.random and name not in UNINITIALISED
    wrong = differs(got.value, want.value, values, strides=not isinstance(want.value, Written))
    if wrong and wrong.startswith("strides"):  # PyTorch's two promises, the CPU's kernel and the meta kernel, may differ
        meta = run(call, sample, "meta", stays)
        if meta.error is None and same_strides(got.value, meta.value):
            wrong = differs(got.value, want.value, values, strides=False)
    if wrong and name in SIGNS and "values" in wrong:
        one, other = (sample.output_process_fn_grad(_results(o.value)) for o in (got, want))
        wrong = differs(one, other, strides=False)
    if wrong is None:
        if len(got.written) != len(want.written):
            return "mutation", f"mutation: {len(got.written)} arguments were written instead of {len(want.written)}"
        wrong = differs(got.written, want.written, values)
        return ("mutation", f"mutation: {wrong}") if wrong else None
    if wrong.startswith("values") and any(t.dtype in WIDER for t in tree.tree_leaves(want.value) if isinstance(t, torch.Tensor)):
        wide = run(call, sample, "cpu", stays, wide=True)
        if wide.error is None:
            truth = narrowed(wide.value, want.value)
            if differs(got.value, truth, strides=False) is None or as_right(got.value, want.value, wide.value):
                return None
    return wrong.split(":")[0], wrong


def raised_as(got: Outcome, kind, words: str) -> tuple[str, str] | None:
    """The device must raise what the CPU raises."""
    if got.error is None:
        return "silent", f"silent: the CPU raises {kind.__name__}: {words[:200]}"
    if isinstance(got.error, kind) or (issubclass(kind, type(got.error)) and type(got.error) is not Exception):
        return None
    return "raises", f"raises: {type(got.error).__name__}: {str(got.error)[:300]} instead of {kind.__name__}: {words[:200]}"
