"""Random little programs of many ops over shared tensors, for the CPU and the device: what Hypothesis draws and shrinks.

As in view_programs.py a program is a list of Python lines, written while it runs on the CPU. Names t0, t1, ... hold
*exact* values: small multiples of 1/8, on which the ops used here round nothing, so that both devices agree to the last
bit and comparisons, floors and sorts cannot tip over. Names s0, s1, ... hold *smooth* ones: results of exp, softmax and
their like, compared within a tolerance and fed to continuous ops alone.
"""

import math
import warnings

import torch
import view_programs as vp
from hypothesis import strategies as st

START = [
    "t0 = (torch.arange(6) - 2).to(torch.float32).reshape(2, 3).to(dev)",
    "t1 = torch.tensor([[0.5, -1.25], [2.0, 0.125], [-3.0, 1.5]]).to(dev)",
    "t2 = (torch.arange(6) % 4 - 1).reshape(2, 3).to(dev)",
    "t3 = torch.tensor([True, False, True]).to(dev)",
]
TYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
LARGEST = {torch.float32: 2**14, torch.float64: 2**14, torch.bfloat16: 2**4, torch.float16: 2**7, torch.uint8: 255}
ALIVE = 12  # names at once

ANY = [
    "{x} + {y}", "{x} * {y}", "{x}.clone()", "{x} == {y}", "{x} != {y}", "{x} < {y}", "{x} >= {y}", "torch.maximum({x}, {y})",
    "torch.where({x} > 0, {x}, {y})", "torch.where({x} == {y}, {x}, 1)", "torch.cat([{x}, {x}])", "torch.stack([{x}, {x}], 1)",
    "{x}.sum()", "{x}.sum(0)", "{x}.sum(-1, keepdim=True)", "{x}.amax(0)", "{x}.amin(-1)", "{x}.any()", "{x}.all(0)", "{x}.flip(0)",
    "{x}.roll(1, 0)", "{x}.repeat(2, 1)", "{x}.sort(0, stable=True).values", "{x}.sort(-1, stable=True).indices", "{x}.argmax()",
    "{x}.count_nonzero()", "{x}.cumsum(0)", "{x}.logical_not()", "torch.logical_xor({x}, {y})", "{x}.masked_fill({x} == 1, 0)",
    "{x}.index_select(0, torch.tensor([0, 0]).to(dev))", "{x}[torch.tensor([0, -1]).to(dev)]", "{x}[{x} > 0]", "{x}.nonzero()",
    "torch.take_along_dim({x}, torch.zeros_like({x}, dtype=torch.int64), 0)", "{x}.tril()", "{x}.gather(0, torch.zeros_like({x}, dtype=torch.int64))",
    "torch.zeros_like({x}).scatter_add(0, torch.zeros_like({x}, dtype=torch.int64), {x})", "{x}.unique()", "torch.isin({x}, {y}.contiguous())",
    "torch.nn.functional.pad({x}, (1, 2))", "{x}.expand_as({x}).contiguous()", "torch.tensor(2, device=dev) * {x}", "{x} * True", "{x} + 1",
]  # fmt: skip
# (median of contiguous ones: of an expanded tensor PyTorch 2.13's CPU kernel reads beyond its memory)
NUMBERS = [
    "{x} - {y}", "-{x}", "{x}.abs()", "{x}.sign()", "{x}.clamp(-1, 2)", "{x}.relu()", "torch.minimum({x}, {y})", "{x} // 2", "{x} % 3",
    "torch.remainder({x}, 4)", "torch.fmod({x}, 4)", "{x}.square()", "{x}.prod(0)", "{x}.diff(dim=0)", "{x} - 0.5", "{x} * 0.5",
    "{x} / 2", "torch.lerp({x} * 1.0, {x} * 1.0, 0.5)", "{x}.cummax(0).values", "{x}.contiguous().median(0).values", "{x}.topk(1, 0).values", "{x}.float() @ {x}.float().T",
    "torch.einsum('...i,...i->...', {x}, {x})", "torch.addcmul({x}, {x}, {x})", "{x}.floor()", "{x}.trunc()", "{x}.round()", "torch.sub({x}, {y}, alpha=2)",
]  # fmt: skip
WHOLE = ["{x} & 3", "{x} | 1", "{x} ^ {y}", "~{x}", "({x} | 0) << 1", "({x} | 0) >> 1", "torch.gcd({x}, {y})", "torch.bincount({x}.abs().flatten())"]
SMOOTH = [
    "{x}.double().sin()", "torch.exp({x}.double().clamp(-4, 4))", "torch.softmax({x}.double(), -1)", "{x}.double().tanh()", "{x}.double().mean()",
    "torch.sqrt({x}.double().abs() + 1)", "torch.nn.functional.gelu({x}.double())", "torch.log1p({x}.double().abs())", "{x}.double().std()",
    "torch.nn.functional.layer_norm({x}.double(), {x}.shape[-1:])", "torch.logsumexp({x}.double(), 0)", "{x}.double().var(-1, correction=0)",
]  # fmt: skip
INTO = [
    "{x}.add_({y})", "{x}.mul_({y})", "{x}.copy_({y})", "{x}.zero_()", "{x}.fill_(2)", "{x}[0] = 1", "{x}[..., 0] += 1", "{x}[{x} > 1] = 0",
    "{x}.masked_fill_({x} == 0, 3)", "{x}.clamp_(0, 2)", "{x}.neg_()", "torch.add({x}, 1, out={x})", "{x}.t_()", "{x}.unsqueeze_(0)", "{x}.squeeze_()",
    "{x}.index_add_(0, torch.tensor([0, 0]).to(dev), torch.ones_like({x})[:1].repeat_interleave(2, 0))", "{x}.sub_({x})", "{x}.set_({y})",
    "{x}.index_put_((torch.tensor([0, 0]).to(dev),), torch.ones_like({x})[0], accumulate=True)", "{x}.logical_not_()", "{x}.data = {y}.clone()",
]  # fmt: skip
VIEWS = [
    "{x}.t()", "{x}[1:]", "{x}[..., -1]", "{x}[::2]", "{x}.reshape(-1)", "{x}.unsqueeze(-1)", "{x}.diagonal()", "{x}.transpose(0, -1)", "{x}.expand(2, *{x}.shape)",
    "{x}.view(-1)", "{x}.narrow(0, 0, 1)", "{x}.chunk(2)[0]", "{x}.unfold(0, 1, 1)", "{x}.flatten()", "{x}.detach()",
]  # fmt: skip
GRADIENTS = [
    "torch.autograd.grad(({y}.double() * w).sin().sum(), w)[0]", "torch.autograd.grad((w.exp() * {x}.double()).sum(), w)[0]",
    "torch.func.grad(lambda v: (v * {x}.double()).square().sum())(torch.ones((), dtype=torch.float64, device=dev))",
]  # fmt: skip
READS = ["{x}.sum().item()", "str({x})", "{x}.cpu()", "bool({x}.any())", "{x}.tolist()", "flush()"]


def flush():
    """A flush point: nothing on the CPU."""
    torch.tpu.synchronize()


def environment(device: str) -> dict:
    """The names that a program starts with."""
    env = {"torch": torch, "dev": device, "flush": flush}
    env["w"] = torch.tensor(0.75, dtype=torch.float64, device=device, requires_grad=True)
    return env


def tensors(env, letter: str) -> list[str]:
    """The names of one kind, oldest first."""
    return sorted((n for n, v in env.items() if n[0] == letter and n[1:].isdigit() and isinstance(v, torch.Tensor)), key=lambda n: int(n[1:]))


def line_of(choice: vp.Choice, env: dict, number: int) -> str | None:
    """The line that a choice means here; None if it means nothing."""
    exact, smooth = tensors(env, "t"), tensors(env, "s")
    x = vp.pick(exact, choice.tensor)
    t = env[x]
    y = vp.pick([n for n in exact if vp._broadcasts(env[n], t)] if choice.other % 5 else exact, choice.other // 5)
    if choice.kind == "smooth":
        return f"s{number} = {vp.pick(SMOOTH, choice.statement)}".replace("{x}", x) if len(smooth) < ALIVE else None
    if choice.kind == "gradient":
        return f"s{number} = {vp.pick(GRADIENTS, choice.statement)}".replace("{x}", x).replace("{y}", y)
    if choice.kind == "read":
        return vp.pick(READS, choice.statement).replace("{x}", x)
    if choice.kind == "write":
        if vp.overlapping(t) or 0 in t.stride() or vp.undefined(t, env[y]):
            return None
        return vp.pick(INTO, choice.statement).replace("{x}", x).replace("{y}", y)
    if choice.kind == "del":
        return f"del {x}" if len(exact) > 4 else None
    if len(exact) >= ALIVE:
        return None
    if choice.kind == "type":
        return f"t{number} = {x}.to(torch.{vp.pick(TYPES, choice.statement)})"
    table = {"view": VIEWS, "whole": WHOLE, "number": NUMBERS}.get(choice.kind, ANY)
    return f"t{number} = {vp.pick(table, choice.statement)}".replace("{x}", x).replace("{y}", y)


def exact(env) -> bool:
    """Are all t's small multiples of 1/8, far from where their dtype would round?"""
    for name in tensors(env, "t"):
        t = env[name]
        if t.numel() > 200 or t.dim() > 4:
            return False
        if t.dtype.is_floating_point and t.numel():
            t = t.double()
            limit = LARGEST[env[name].dtype]
            if not torch.isfinite(t).all() or t.abs().max() > limit or ((t * 8) % 1 != 0).any():
                return False
    return True


def write(choices) -> list[str]:
    """The program of these choices. Lines after which something is no longer exact are left out."""
    program = list(START)
    env = environment("cpu")
    for line in START:
        vp.step(line, env)
    for choice in choices:
        line = line_of(choice, env, len(program))
        if line is None:
            continue
        vp.step(line, env)
        if exact(env):
            program.append(line)
        else:  # go on from before that line
            env = environment("cpu")
            for earlier in program:
                vp.step(earlier, env)
    return program


def run(program, device: str):
    """(the error of each line, the final tensors on the CPU)."""
    env = environment(device)
    errors = [vp.step(line, env) for line in program]
    names = tensors(env, "t") + tensors(env, "s")
    return errors, {n: env[n].detach().cpu().clone() for n in names}


def difference(program, device: str = "tpu") -> str | None:
    """What differs between the CPU and the device, with the program; None if nothing does."""
    want_errors, want = run(program, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got_errors, got = run(program, device)
    shown = "\n".join(f"    {line}" for line in program)
    for line, a, b in zip(program, want_errors, got_errors, strict=True):
        if (a is None) != (b is None):
            return f"`{line}`: the CPU raises {a}, {device} {b}\n{shown}"
    for name, value in want.items():
        other = got[name]
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            return f"{name}: cpu {value.dtype} {tuple(value.shape)}, {device} {other.dtype} {tuple(other.shape)}\n{shown}"
        close = 1e-9 if name[0] == "s" else 0.0
        if not torch.allclose(value.double(), other.double(), rtol=close, atol=close, equal_nan=True):
            return f"values of {name}\n  cpu: {value}\n  {device}: {other}\n{shown}"
    return None


def compiled_difference(program) -> str | None:
    """The same with the program's lines as the body of a function that torch.compile takes."""
    body = [line for line in program[len(START) :] if not line.startswith("del")]
    text = "def f(t0, t1, t2, t3, w):\n" + "".join(f"    {line}\n" for line in body)
    names = sorted({line.split(" = ")[0] for line in body if line[0] in "ts" and " = " in line and line.split(" = ")[0].isalnum()})
    text += f"    return [{', '.join(['t0', 't1', 't2', 't3', *names])}]\n"
    answers = []
    for device in ("cpu", "tpu"):
        env = environment(device)
        exec(text, env)
        for line in START:
            vp.step(line, env)
        run = env["f"] if device == "cpu" else torch.compile(env["f"], dynamic=False)
        out = run(env["t0"], env["t1"], env["t2"], env["t3"], env["w"])
        answers.append([t.detach().cpu().double() for t in out])
    for name, a, b in zip(["t0", "t1", "t2", "t3", *names], *answers, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True):
            return f"{name}\n  cpu: {a}\n  compiled: {b}\n{text}"
    return None


KINDS = (
    "nothing", *("any",) * 5, *("number",) * 4, "whole", *("view",) * 3, *("write",) * 4, "type", "smooth", "gradient", "read", "del",
)  # fmt: skip
COUNT = st.integers(0, 9999)
CHOICES = st.builds(vp.Choice, st.sampled_from(KINDS), COUNT, COUNT, COUNT)


@st.composite
def programs(draw, most: int = 40) -> list[str]:
    """A program of 5 to `most` choices after START."""
    return write(draw(st.lists(CHOICES, min_size=5, max_size=most)))


def mean_length(programs_) -> float:
    """Lines after START, on average: a test sees to it that programs do something."""
    return math.fsum(len(p) - len(START) for p in programs_) / len(programs_)
