"""Random little programs over tensors that share memory: a Hypothesis strategy, how to run one, and how to compare.

A program is a list of Python lines over names t0, t1, ...; a failing test prints the shortest that Hypothesis finds. It
is written while it runs on the CPU, so that most lines are valid; those that are not must fail alike on both devices.
"""

import warnings
from typing import NamedTuple

import torch
from hypothesis import strategies as st

START = [
    "t0 = torch.arange(6.).to(dev)",
    "t1 = torch.arange(6.).reshape(2, 3).clone().to(dev)",
    "t2 = torch.complex(torch.arange(3.), -torch.arange(1., 4.)).to(dev)",
]
LIMIT = 9  # names alive at once


def resize(tensor, size):
    """resize_, with new memory set to zero (PyTorch leaves it as it was)."""
    before = tensor.untyped_storage().nbytes() // tensor.element_size()
    tensor.resize_(size)
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    whole[before:].zero_()


def place(tensor, source):
    """set_ to two elements of source's memory from the second on, with what it grows by set to zero."""
    before = source.untyped_storage().nbytes() // tensor.element_size()
    tensor.set_(source.untyped_storage(), 1, (2,), (1,))
    torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(source.untyped_storage())[before:].zero_()


def environment(device: str) -> dict:
    """The names a program starts with."""
    return {"torch": torch, "dev": device, "resize": resize, "place": place}


def step(line: str, env: dict) -> str | None:
    """Run one line; the name of the exception's type, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, env)
    except Exception as error:
        return type(error).__name__
    return None


def names(env) -> list[str]:
    """The tensors of a program, oldest first."""
    return sorted((n for n, v in env.items() if isinstance(v, torch.Tensor)), key=lambda n: int(n[1:]))


def geometry(env) -> dict:
    """For each tensor all that can be seen without its values; who shares memory with whom, and where in it."""
    seen, out = {}, {}
    for name in names(env):
        t = env[name]
        s = t.untyped_storage()
        owner = seen.setdefault(s._cdata, name)
        at = t.data_ptr() - s.data_ptr() if t.numel() else None
        out[name] = {
            "dtype": t.dtype, "shape": tuple(t.shape), "stride": _strides(t), "offset": t.storage_offset(),
            "version": t._version, "contiguous": t.is_contiguous(), "bytes": s.nbytes(), "memory of": owner, "at": at,
            "conj": t.is_conj(), "view": t._is_view(),
        }  # fmt: skip
    return out


def _strides(t) -> tuple[int | None, ...]:
    """The strides that mean something. PyTorch's CPU kernels differ among themselves on those of dimensions of size 1."""
    return tuple([s if n != 1 else None for n, s in zip(t.shape, t.stride(), strict=True)])


def values(env) -> dict:
    """For each tensor its values on the CPU."""
    return {name: env[name].detach().cpu().resolve_conj().clone() for name in names(env)}


def run(program, device: str):
    """[(line, error, geometry)] and the final values."""
    env, trail = environment(device), []
    for line in program:
        error = step(line, env)
        trail.append((line, error, geometry(env)))
    return trail, values(env)


def difference(program, device: str = "tpu") -> str | None:
    """What differs between the CPU and the device, with the program; None if nothing does."""
    want, want_values = run(program, "cpu")
    got, got_values = run(program, device)
    shown = "\n".join(f"    {line}" for line in program)
    for number, ((line, e1, g1), (_, e2, g2)) in enumerate(zip(want, got, strict=True)):
        if e1 != e2:
            return f"line {number}, `{line}`: the CPU raises {e1}, {device} {e2}\n{shown}"
        for name in g1:
            wrong = {k: (v, g2[name][k]) for k, v in g1[name].items() if v != g2[name][k]}
            if wrong:
                return f"after line {number}, `{line}`: {name} has {wrong} (cpu, {device})\n{shown}"
    for name, value in want_values.items():
        if not torch.allclose(value, got_values[name], rtol=1e-6, atol=1e-6, equal_nan=True):
            return f"values of {name}\n  cpu: {value}\n  {device}: {got_values[name]}\n{shown}"
    return None


# --- drawing ------------------------------------------------------------------------------------------------------


def overlapping(t) -> bool:
    """Do two elements share memory, other than by a stride of 0? PyTorch leaves writes to such a tensor undefined."""
    if t.numel() < 2:
        return False
    kept = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s]
    index = torch.arange(1 + sum((n - 1) * s for n, s in kept)).as_strided([n for n, _ in kept], [s for _, s in kept])
    return len(index.unique()) < index.numel()


def undefined(x, y) -> bool:
    """Do they share elements while one of them has gaps? PyTorch neither refuses nor defines reading one into the other."""
    if x is y or x.untyped_storage()._cdata != y.untyped_storage()._cdata or not x.numel() or not y.numel():
        return False
    if x.shape == y.shape and x.stride() == y.stride() and x.storage_offset() == y.storage_offset():
        return False
    spans = [(t.data_ptr(), t.data_ptr() + (1 + _span(t)) * t.element_size()) for t in (x, y)]
    gaps = any(1 + _span(t) != t.numel() for t in (x, y))
    return gaps and spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _span(t) -> int:
    return sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def views(t) -> list[str]:
    """Expressions over {x} that are views (or, for reshape and flatten, may be)."""
    out = ["{x}.detach()", "{x}.data", "{x}.unsqueeze(0)", "{x}.squeeze()", "{x}.view(-1)", "{x}.reshape(-1)", "{x}.flatten()"]
    n, rank = t.numel(), t.dim()
    if t.dtype == torch.float32:
        out += ["{x}.view(torch.int32)"]
        if rank and t.shape[-1] == 2:
            out += ["torch.view_as_complex({x})"] * 3
    if t.dtype == torch.complex64:
        out += ["{x}.real", "{x}.imag", "{x}.conj()", "torch.view_as_real({x})", "{x}.view(torch.float32)"]
    if n == 6:
        out += ["{x}.view(2, 3)", "{x}.reshape(3, 2)", "{x}.view(1, 6, 1)"]
    if rank and t.shape[0] > 1:
        out += ["{x}[1:]", "{x}[::2]", "{x}[1]", "{x}.select(0, 0)", "{x}.narrow(0, 0, 2)", "{x}.narrow(-1, 0, 1)"]
        out += ["{x}.chunk(2)[1]", "{x}.split(1)[0]", "{x}.unbind(0)[1]", "{x}.unfold(0, 2, 2)", "{x}[..., 1:]"]
        out += ["{x}.tensor_split(2)[0]", "{x}.unfold(0, 1, 1)"]
        out += ["{x}.unflatten(0, (1, -1))"] + (["{x}.unflatten(0, (2, -1))"] if t.shape[0] % 2 == 0 else [])
    if rank >= 2:
        out += ["{x}.t()", "{x}.mT", "{x}.transpose(0, -1)", "{x}.swapaxes(0, 1)", "{x}.movedim(0, -1)", "{x}.diagonal()"]
        out += ["{x}.diagonal(1)", "{x}.flatten(0, 1)", "{x}[:, 0]", f"{{x}}.permute({', '.join(map(str, reversed(range(rank))))})"]
    out += [f"{{x}}.expand({', '.join(map(str, (2, *t.shape)))})"]
    room = t.untyped_storage().nbytes() // t.element_size()
    out += ["{x}.as_strided((2, 2), (2, 1))", "{x}.as_strided((2,), (2,), 1)"] if room >= 4 else []
    out += ["{x}.as_strided((2, 9), (9, 1))"]  # out of bounds
    return out


NEW = ["{x}.clone()", "{x}.contiguous()", "({x} + 1)", "{x}.to(torch.float64)", "torch.empty_like({x}).copy_({x})",
       "torch.empty(0, device=dev)", "{x}.to(torch.float32)"]  # fmt: skip


def writes(t) -> list[str]:
    """Statements that change the memory or the geometry of {x}; {y} stands for one of the other names."""
    if t.dtype == torch.int32:  # the bits of floats: 2.0, a flipped sign, never a denormal number, which XLA flushes
        return ["{x}.fill_(1073741824)", "{x}.bitwise_xor_(-2147483648)", "{x}.zero_()", "{x}[0] = 1073741824"]
    out = ["{x}.zero_()", "{x}.fill_(3)", "{x}.data.zero_()", "{x}.copy_({y})", "{x}.copy_(torch.tensor(5))"]
    shape = tuple(t.shape)
    like = f"torch.arange(1., {t.numel() + 1}).reshape({shape})"
    out += [f"{{x}}.copy_({like})", f"{{x}}.copy_({like}.to(dev))"]
    mask = f"({like} % 2 == 0)"
    out += [f"{{x}}.masked_fill_({mask}.to(dev), 7)", f"{{x}}[{mask}.to(dev)] = 2"]
    if t.dtype in (torch.float32, torch.float64, torch.complex64):
        out += ["{x}.add_(1)", "{x}.mul_(2)", "{x}.add_({y})", "{x}.mul_({y})", "{x}.data.add_(1)", "{x}.sub_({y}, alpha=2)"]
        out += ["torch.add({y}, 1, out={x})", "torch.mul({x}, {y}, out={x})", "torch.neg({y}, out={x})"]
    if t.dim() and 0 not in t.stride() and t.shape[0]:
        last = t.shape[0] - 1
        index = f"torch.tensor([{last}, 0]).to(dev)" if last else "torch.tensor([0]).to(dev)"
        n = 2 if last else 1
        source = f"torch.ones({(n, *shape[1:])}, dtype={{x}}.dtype).to(dev)"
        out += [f"{{x}}.index_put_(({index},), {source})", f"{{x}}[{index}] = 4", "{x}[0] = 9", f"{{x}}.index_fill_(0, {index}, 6)"]
        out += ["{x}[::2] = 8", f"{{x}}.index_copy_(0, {index}, {source})"]
        out += [f"{{x}}.index_add_(0, {index}, {source})"]
        out += [f"{{x}}.scatter_(0, torch.zeros({(1, *shape[1:])}, dtype=torch.int64).to(dev), 5)"]
    return out


def reshapes(t) -> list[str]:
    """Statements that change the geometry of {x}, or what memory it lies on."""
    out = ["{x}.unsqueeze_(0)", "{x}.squeeze_()", "{x}.data = {y}", "{x}.set_({y})", "resize({x}, (2,))", "resize({x}, (2, 2))"]
    out += ["place({x}, {y})", "{x}.set_()", "{x}.detach_()"]
    if not t.is_conj():  # see line_of: its clone is none
        out += ["{x}.data = {x}.data.clone()"]
    out += ["resize({x}, (2, 5))", "resize({x}, (12,))", "resize({x}, (0,))", "{x}.as_strided_((2,), (1,), 1)"]
    if t.dim() >= 2:
        out += ["{x}.t_()", "{x}.transpose_(0, -1)", "{x}.swapaxes_(0, 1)"]
    return out


READS = ["{x}.sum().item()", "{x}.cpu()", "str({x})", "bool(({x} == {x}).all())", "{x}.tolist()"]


class Choice(NamedTuple):
    """One line to be: its kind, and which tensor, which statement, which other tensor, each counted round and round.

    So any list of choices is a program, and without some of them it is a shorter one: Hypothesis can shrink it.
    """

    kind: str
    tensor: int
    statement: int
    other: int


def line_of(choice: Choice, env: dict, number: int) -> str | None:
    """The line that a choice means where `env` is what the program has made so far; None if it means nothing there."""
    alive = names(env)
    x = pick(alive, choice.tensor)
    t = env[x]
    if choice.kind in ("view", "new"):
        if len(alive) == LIMIT:
            return None
        line = f"t{number} = {pick(views(t) if choice.kind == 'view' else NEW, choice.statement)}"
    elif choice.kind == "shape":
        line = pick(reshapes(t), choice.statement)
    elif choice.kind == "read":
        line = pick(READS, choice.statement)
    elif choice.kind == "del":
        if len(alive) <= 3:
            return None
        line = "del {x}"
    elif choice.kind == "write" and not overlapping(t):
        line = pick(writes(t), choice.statement)
    else:
        return None
    others = [n for n in alive if not undefined(t, env[n])]
    if line == "{x}.data = {y}":  # torch compares the kinds of tensors, of which a lazy conjugate is another, except on the CPU
        others = [n for n in others if env[n].is_conj() == t.is_conj()]
    fits = [n for n in others if _broadcasts(env[n], t) and env[n].dtype == t.dtype]
    return line.replace("{x}", x).replace("{y}", pick(fits if fits and choice.other % 10 else others, choice.other // 10))


def pick(options: list, number: int):
    """One of them."""
    return options[number % len(options)]


def write(choices) -> list[str]:
    """The program of these choices: START, and a line for each that means one."""
    env, program = environment("cpu"), list(START)
    for line in START:
        step(line, env)
    for choice in choices:
        line = line_of(choice, env, len(program))
        if line is not None:
            step(line, env)
            program.append(line)
    return program


KINDS = ("nothing", *("view",) * 4, *("write",) * 5, "new", "shape", "read", "del")  # the first is what others shrink to
NUMBERS = st.integers(0, 9999)
CHOICES = st.builds(Choice, st.sampled_from(KINDS), NUMBERS, NUMBERS, NUMBERS)


@st.composite
def programs(draw) -> list[str]:
    """A program of up to 24 lines after START."""
    return write(draw(st.lists(CHOICES, min_size=8, max_size=24)))


def _broadcasts(small, big) -> bool:
    try:
        return torch.broadcast_shapes(small.shape, big.shape) == big.shape
    except RuntimeError:
        return False
