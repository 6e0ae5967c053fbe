"""Where do numbers go wrong? `find_nonfinite` names the op that made the first NaN or inf; `compare` ranks the modules
of a model by how far the device is from the CPU.

Both run the code for real. `find_nonfinite` looks at each result on the host, so it is slow on a TPU: a tool for an
afternoon of looking, not for a training run.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections import OrderedDict

import ml_dtypes  # noqa: F401  numpy learns bfloat16
import numpy as np
import torch

from tpu_lab import errors
from tpu_lab import trace as _trace
from tpu_lab.viz import compared, nonfinite
from tpu_lab.viz.compared import Difference
from tpu_lab.viz.nonfinite import Looked, Seen, Span

HISTORY = 20_000  # ops whose ranges are kept, to tell where an input came from
CHAIN = 6  # ops shown on the way to the one that broke


def find_nonfinite(fn, *args, **kwargs):
    """Call fn(*args, **kwargs) op by op, and name the first op that makes NaN or inf from finite inputs.

    Forward and backward: a backward op names its forward op. An inf that is written on purpose (masked_fill with -inf,
    a tensor full of it, or one in the data) is no finding, nor is what ops hand on from it; a NaN made from it is.
    Returns a view: its title says it in a sentence, `rows` has the ranges of the op's inputs and results and of the ops
    on the way there. len(view) is 0 when nothing was found. An exception of fn goes through unless something was found:
    then it is named in the view. RuntimeError when it is called inside itself.
    """
    from tpu_lab.backend import state, watch, where

    search = _Search()
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(state.alone("find_nonfinite"))
        trace = _trace.active
        if trace is None:
            trace = _trace.start(limit=10**6)
            stack.callback(_trace.stop)
            stack.enter_context(where.watch_modules())
        search.trace = trace
        stack.enter_context(state.mode_scope("strict"))
        stack.enter_context(watch.each_op(search.look))
        try:
            fn(*args, **kwargs)
        except Exception as raised:
            if search.made is None:
                raise
            error = raised
    return nonfinite.draw(search.result(error))


class _Search:
    """What is known while the ops go by."""

    trace: _trace.Trace

    def __init__(self) -> None:
        self.count = 0
        self.phases: set[str] = set()
        self.made: Seen | None = None
        self.came_in: Seen | None = None
        self.near: list[tuple[float, Seen]] = []  # the ops whose results come nearest to their dtype's limit
        self.history: OrderedDict[int, tuple[Seen, tuple]] = OrderedDict()
        self.maker: dict[int, tuple] = {}  # id of an array -> (weak reference to it, the op that made it)
        self.chain: list[Seen] = []

    def look(self, name, inputs, outputs, numbers) -> None:
        """Called after each op, with the lock held."""
        self.count += 1
        record = self.trace.ops[-1] if self.trace.ops else None
        if record is None or record.name != name:
            return  # a full trace: nothing could be named
        self.phases.add(record.phase)
        if self.made is not None:
            return
        out = tuple(span(n, a) for n, _, a in outputs)
        into = tuple(span(n, a) for n, _, a in inputs)
        makers = tuple(self._made_by(v) for _, v, _ in inputs)
        forward = record.forward if record.forward is not None and record.forward < len(self.trace.ops) else None
        seen = Seen(record, self.trace.ops[forward] if forward is not None else None, into, out, (*numbers, *_divisor(record.static)))
        bad, inputs_nan = any(s.nan or s.inf for s in out), any(s.nan for s in into)
        inputs_inf = any(s.inf for s in into) or not all(map(math.isfinite, numbers)) or _says_inf(record.static)
        new_nan = any(s.nan for s in out) and not inputs_nan
        new_inf = any(s.inf for s in out) and not inputs_nan and not inputs_inf
        if new_nan or new_inf:
            self.made = seen
            self.chain = self._way(into, makers)
            return
        if (
            bad
            and self.came_in is None
            and any((s.nan or s.inf) and m is None for s, m in zip(into, makers, strict=True))
        ):
            self.came_in = seen
        self._remember(record.index, seen, makers, outputs)

    def _made_by(self, value):
        found = self.maker.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def _remember(self, index, seen, makers, outputs) -> None:
        self.history[index] = (seen, makers)
        if len(self.history) > HISTORY:
            self.history.popitem(last=False)
        if len(self.maker) > 4 * HISTORY:
            self.maker = {k: v for k, v in self.maker.items() if v[0]() is not None}
        for _, value, _ in outputs:
            if value is not None:
                self.maker[id(value)] = (weakref.ref(value), index)
        nearness = max((s.size_of_limit for s in seen.outputs), default=0.0)
        if nearness > (self.near[-1][0] if len(self.near) == 8 else 0.0):
            line = (seen.name, seen.place)  # of a line that is run often, the nearest
            rest = [p for p in self.near if (p[1].name, p[1].place) != line or p[0] > nearness]
            if len(rest) == len(self.near) or all((s.name, s.place) != line for _, s in rest):
                self.near = sorted([*rest, (nearness, seen)], key=lambda pair: -pair[0])[:8]

    def _way(self, spans, makers) -> list[Seen]:
        """The ops that made the largest input, its largest input, and so on; in program order."""
        way: list[Seen] = []
        while len(way) < CHAIN:
            known = [(s.weight, m) for s, m in zip(spans, makers, strict=True) if m in self.history]
            if not known:
                break
            seen, makers = self.history[max(known, key=lambda pair: pair[0])[1]]
            spans = seen.inputs
            way.append(seen)
        return way[::-1]

    def result(self, error) -> Looked:
        return Looked(
            made=self.made, came_in=self.came_in, chain=tuple(self.chain), near=tuple(s for _, s in self.near),
            count=self.count, phases=tuple(p for p in ("forward", "backward", "optimizer") if p in self.phases),
            error="" if error is None else errors.named(error),
        )  # fmt: skip


def _says_inf(static) -> bool:
    return any(s.partition("=")[2].strip("-") in ("inf", "nan") for s in static)


def _divisor(static) -> list[float]:
    """A divisor that is part of the program: `other=0`."""
    return [float(s[6:]) for s in static if s.startswith("other=") and s[6:].lstrip("-").isdigit()]


def span(name: str, array: np.ndarray) -> Span:
    """The range of an array's finite elements, and how many are NaN, inf or zero. Integers have a range, too."""
    kind = "bool" if array.dtype == np.bool_ else array.dtype.name
    text = f"{nonfinite.SHORT.get(kind, kind)}[{','.join(map(str, array.shape))}]"
    if array.dtype == np.bool_ or not array.size:
        return Span(name, text, None, None, 0, 0, 0, 0, 0.0)
    if np.iscomplexobj(array):
        array = np.ascontiguousarray(array).view(np.float64 if array.dtype == np.complex128 else np.float32)
    zeros = int(array.size - np.count_nonzero(array))
    if array.dtype.kind in "iu":
        return Span(name, text, float(array.min()), float(array.max()), 0, 0, 0, zeros, 0.0)
    limit = float(ml_dtypes.finfo(array.dtype).max)
    finite = np.isfinite(array)
    if finite.all():
        low, high = float(array.min()), float(array.max())
        return Span(name, text, low, high, 0, 0, 0, zeros, max(-low, high) / limit)
    nan, below = int(np.isnan(array).sum()), int((array == -np.inf).sum())
    rest = array[finite]
    smallest, largest = (float(rest.min()), float(rest.max())) if rest.size else (None, None)
    return Span(name, text, smallest, largest, nan, int(array.size - finite.sum()) - nan, below, zeros, 0.0)


# --- compare ----------------------------------------------------------------------------------------------------------

F = torch.nn.functional
DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class _NoDropout(torch.overrides.TorchFunctionMode):
    """Dropout gives its input. Attention modules and LSTMs, which drop inside, are told by `_silence`."""

    def __init__(self):
        super().__init__()
        self.silent = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in DROPOUT:
            self.silent += 1
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
            self.silent += bool(given.get("dropout_p"))
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0, **dict(zip(("is_causal",), args[5:6], strict=False))}
        return function(*args, **kwargs)


def compare(model, *inputs, ref: str = "cpu", rtol=None, atol=None, backward: bool = False, **kwargs):
    """Run a copy of the model on the CPU and one on "tpu", and rank its modules by relative error.

    model: an nn.Module; it and the inputs are copied, nothing of yours changes. The error of a tensor is
    |tpu - cpu| / |cpu| in the 2-norm; it is held against the tolerance of torch.testing.assert_close for its dtype, or
    rtol and atol (give both): the largest |tpu - cpu| / (atol + rtol |cpu|), at most 1 when all is well. Dropout is
    switched off in both: random numbers differ between devices. backward=True: gradients of the parameters, too,
    of the scalar that the model returns, else of its output times fixed random weights.
    Returns a view; ValueError for another ref, TypeError for what is no module.
    """
    if ref != "cpu":
        raise ValueError(f'compare(ref={ref!r}): the reference is "cpu"')
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"compare needs an nn.Module, not a {type(model).__name__}: wrap the function in a module")
    if (rtol is None) != (atol is None):
        raise ValueError("compare: give both rtol and atol, or neither")
    from tpu_lab.backend import precision, rng, state

    tree = torch.utils._pytree
    here = copy.deepcopy(model).to("cpu")
    there = copy.deepcopy(here).to("tpu")
    quiet = _NoDropout()
    quiet.silent = _silence(here) and _silence(there)
    call = copy.deepcopy((inputs, kwargs))
    of_cpu: dict[str, list] = {}
    found: list[Difference] = []

    def keep(name, module, values):
        of_cpu.setdefault(name, []).append(values)

    def measure(name, module, values):
        calls = of_cpu.get(name, [])
        if not calls:
            return
        (args, out), (args_tpu, out_tpu) = calls.pop(0), values
        inherited = _difference("", "", 0, args, args_tpu, rtol, atol)
        found.append(
            _difference(name, type(module).__name__, len(found), out, out_tpu, rtol, atol)._replace(
                inherited=inherited.error if inherited.shape else None
            )
        )

    def run(module, device, each):
        # of a copy: a model may write to its inputs
        moved = tree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, copy.deepcopy(call))
        handles = [m.register_forward_hook(_hook(n, each)) for n, m in module.named_modules()]
        try:
            with quiet, torch.set_grad_enabled(backward):
                out = module(*moved[0], **moved[1])
                if backward:
                    _scalar(out).backward()
        finally:
            for handle in handles:
                handle.remove()
        return {n: p.grad.detach().cpu() for n, p in module.named_parameters() if p.grad is not None}

    grads = run(here, "cpu", keep)
    drawn = rng.default.counter
    grads_tpu = run(there, "tpu", measure)
    for name, grad in grads.items():
        if name in grads_tpu:
            found.append(_difference(name, "gradient", len(found), [grad], [grads_tpu[name]], rtol, atol))
    return compared.draw(
        compared.Comparison(
            type(model).__name__,
            tuple(found),
            quiet.silent > 0,
            rng.default.counter != drawn and ("call model.eval()" if model.training else "in its forward"),
            state.WORDS[state.mode()],
            precision.chosen or "",
            (rtol, atol) if rtol is not None else None,
        )  # fmt: skip
    )


def _hook(name, each):
    def hook(module, args, output):
        each(name, module, (_floats(args), _floats(output)))

    return hook


def _floats(value) -> list[torch.Tensor]:
    """The tensors of a nested value on the CPU, copied: a later op may write to them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [v.detach().cpu().clone() for v in leaves if isinstance(v, torch.Tensor)]


def _silence(module) -> int:
    """Switch off the dropout that PyTorch's attention and LSTM modules keep as a number; gives how many they were."""
    inside = (torch.nn.MultiheadAttention, torch.nn.RNNBase)
    found = [m for m in module.modules() if isinstance(m, inside) and m.dropout]
    for m in found:
        m.dropout = 0.0
    return len(found)


def _scalar(out) -> torch.Tensor:
    """What to differentiate: the first scalar of the output, else all of it times fixed random weights."""
    leaves = [v for v in torch.utils._pytree.tree_leaves(out) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not leaves:
        raise ValueError("compare(backward=True): no output of the model needs a gradient")
    for v in leaves:
        if v.dim() == 0:
            return v
    g = torch.Generator().manual_seed(0)
    return torch.stack([(v * torch.randn(v.shape, generator=g).to(v)).sum().float() for v in leaves]).sum()


def _difference(name, kind, order, want, got, rtol, atol) -> Difference:
    """The worst of the tensors of two lists."""
    worst = Difference(name, kind, order, "", 0.0, 0.0, 0.0, 0.0, 0.0, None)
    for a, b in zip(want, got, strict=False):
        if a.shape != b.shape:
            return worst._replace(
                shape=f"{tuple(b.shape)}, on the CPU {tuple(a.shape)}", error=math.inf, excess=math.inf
            )
        r, t = (rtol, atol) if rtol is not None else torch.testing._comparison.default_tolerances(a.dtype)
        wide = torch.complex128 if a.is_complex() else torch.float64
        x, y = a.to(wide), b.to(wide)
        same = (x == y) | (torch.isnan(x) & torch.isnan(y))
        gap = torch.where(same, 0.0, (x - y).abs())
        gap = torch.where(torch.isfinite(gap), gap, math.inf)
        size = torch.where(torch.isfinite(x), x.abs(), 0)
        norm = float(size.square().sum().sqrt())
        error = float(gap.square().sum().sqrt())
        error = error / norm if norm else (0.0 if not error else math.inf)
        allowed = t + r * size
        excess = float(torch.where(gap == 0, 0.0, gap / allowed).max()) if gap.numel() else 0.0
        if not worst.shape or excess > worst.excess or (excess == worst.excess and error > worst.error):
            text = f"{nonfinite.SHORT.get(str(a.dtype)[6:], str(a.dtype)[6:])}[{','.join(map(str, a.shape))}]"
            largest = float(gap.max()) if gap.numel() else 0.0
            worst = worst._replace(shape=text, error=error, largest=largest, excess=excess, rtol=r, atol=t)
    return worst
