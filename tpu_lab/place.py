"""Where something is, in the reader's words: `train.py:43`, `cell 3:2`, `h.0–5.mlp.c_fc`."""

from __future__ import annotations

import functools
import os
import re

_IPYTHON = re.compile(r"<ipython-input-(\d+)-")
_KERNEL = re.compile(r"ipykernel_\d+")
_MARIMO = re.compile(r"__marimo__cell_(\w+?)_?(?:\.py)?$")


@functools.lru_cache(maxsize=4096)
@functools.lru_cache(8192)
def short_file(file: str) -> str:
    """The last part of a path; a notebook cell by the name its host gives it; "" stays ""."""
    if not file:
        return ""
    if match := _IPYTHON.match(file):
        return f"cell [{match[1]}]"
    if match := _MARIMO.search(file):
        return f"cell {match[1]}"
    if _KERNEL.search(file):
        return "cell"
    return os.path.basename(file)


def place(file: str, line: int) -> str:
    """`train.py:43`, or "" when the place is not known."""
    return f"{short_file(file)}:{line}" if file else ""


def block(module: str) -> str:
    """The repeated module an op sits in: `h.0.attn.c_attn` -> `h.0`, `ln_f` -> `ln_f`."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def numbered(module: str) -> bool:
    """Is it one of a row of modules, as `h.0` is? `fc1` is not: its digit belongs to a name that somebody gave."""
    return module.rpartition(".")[2].isdigit()


@functools.lru_cache(8192)
def stem(module: str) -> str:
    """What repeated modules have in common: `h.3.mlp` -> `h.*.mlp`."""
    return re.sub(r"\b\d+\b", "*", module)


def family(modules) -> str:
    """One name for modules alike but for their numbers: h.0.mlp … h.5.mlp -> `h.0–5.mlp`; the first one if they differ."""
    modules = list(dict.fromkeys(m for m in modules if m))
    if len(modules) < 2:
        return modules[0] if modules else ""
    split = [m.split(".") for m in modules]
    if len({len(parts) for parts in split}) > 1:
        return _common(modules)
    out = []
    for column in zip(*split):
        values = list(dict.fromkeys(column))
        if len(values) == 1:
            out.append(values[0])
        elif all(v.isdigit() for v in values):
            numbers = sorted(int(v) for v in values)
            whole = numbers == list(range(numbers[0], numbers[-1] + 1))
            out.append(f"{numbers[0]}\u2013{numbers[-1]}" if whole else "*")
        else:
            return _common(modules)
    return ".".join(out)


def _common(modules) -> str:
    """The common parents of modules that differ in more than numbers, or the first with a count."""
    stems = [stem(m).split(".") for m in modules]
    out = []
    for column in zip(*stems):
        if len(set(column)) > 1:
            break
        out.append(column[0])
    return ".".join(out) if out else f"{modules[0]} and {len(modules) - 1} more"


@functools.lru_cache(8192)
def op_name(name: str) -> str:
    """`aten.add.Tensor` -> `add`; `aten._softmax.default` -> `_softmax`; other namespaces stay."""
    parts = name.split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return parts[1]
    return ".".join(p for p in parts if p != "default")
