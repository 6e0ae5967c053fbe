"""`torch.tpu.pallas.jax_op`: a JAX or Pallas function as a torch custom op over "tpu" tensors.

The op gets a lowering like any other, so it runs in all eager modes, joins fused graphs and compiled models, and shows in
every view by its name.
"""

from __future__ import annotations

import contextlib
import inspect
import typing

import jax
import torch

from tpu_lab.backend import dtypes, kernels, lowering, registry

_SCALARS = {float: "float", int: "int", bool: "bool", str: "str"}
_libraries: dict[str, torch.library.Library] = {}


def jax_op(name: str, fn=None, *, donate_argnums=None):
    """Make `torch.ops.ns.op` out of a JAX function; returns the op. Without `fn`, a decorator.

    name: "ns::op". fn: arrays in, one array out (or a tuple, annotated `-> tuple[jax.Array, jax.Array]`). Parameters are
    tensors unless annotated, or given a default, of type float, int, bool or str: these are static. donate_argnums is
    accepted: values are immutable here, and inputs that nobody else holds are donated by the runtime itself.
    Raises ValueError for a bad name or argument number, TypeError for a signature that no op can have.
    """
    if fn is None:
        return lambda function: jax_op(name, function, donate_argnums=donate_argnums)
    namespace, _, op = name.partition("::")
    if not (namespace.isidentifier() and op.isidentifier()):
        raise ValueError(f"jax_op({name!r}): the name has the form 'namespace::op'")
    schema, tensors = _schema(op, fn)
    for number in (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums or ():
        if number not in tensors:
            raise ValueError(
                f"jax_op({name!r}): donate_argnums={donate_argnums}: argument {number} is not a tensor of {schema}"
            )
    if hasattr(getattr(torch.ops, namespace), op):
        raise ValueError(f"jax_op({name!r}): this op exists already; choose another name")
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    overload = getattr(getattr(torch.ops, namespace), op).default
    interpreted = _interpreted(fn)
    registry.op(overload)(_checked(name, interpreted, len(overload._schema.returns)))
    library.impl(op, _meta(overload, interpreted), "Meta")
    library.impl(op, kernels.door(overload), "PrivateUse1")
    return getattr(getattr(torch.ops, namespace), op)


def _schema(op: str, fn) -> tuple[str, tuple[int, ...]]:
    """The schema of an op with this function's parameters, and the positions of its tensors."""
    signature = inspect.signature(fn)
    try:
        hints = typing.get_type_hints(fn)
    except Exception:  # an annotation that names something unknown says nothing of the type
        hints = {}
    parts, tensors, starred = [], [], False
    for i, p in enumerate(signature.parameters.values()):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"jax_op: {fn.__name__} takes *args or **kwargs: an op needs each parameter by name")
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        given = p.default is not p.empty
        text = _SCALARS.get(hints.get(p.name)) or (_SCALARS.get(type(p.default)) if given else None)
        if text is None:
            tensors.append(i)
            text = "Tensor?" if given and p.default is None else "Tensor"
            if given and p.default is not None:
                raise TypeError(
                    f"jax_op: parameter {p.name} of {fn.__name__} is a tensor and cannot have a default value"
                )
        default = f"={_literal(p.default)}" if given else ""
        parts.append(f"{text} {p.name}{default}")
    returns = hints.get("return")
    many = typing.get_args(returns) if typing.get_origin(returns) is tuple else ()
    out = f"({', '.join(['Tensor'] * len(many))})" if many else "Tensor"
    return f"{op}({', '.join(parts)}) -> {out}", tuple(tensors)


def _literal(value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _interpreted(fn):
    """Without a chip Pallas kernels run in JAX's TPU interpreter, so the same notebook runs on a laptop."""

    def call(*args, **kwargs):
        with _interpreter():
            return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", "fn")
    return call


def _interpreter():
    if jax.default_backend() == "tpu":
        return contextlib.nullcontext()
    from jax.experimental.pallas import tpu

    return tpu.force_tpu_interpret_mode()


def _checked(name, fn, count):
    def lowered(*args, **kwargs):
        out = fn(*args, **kwargs)
        found = len(lowering.flat(out, []))
        if found != count:
            raise TypeError(
                f"{name} gives {found} arrays and its schema says {count}: annotate what the function returns, "
                f"for instance `-> tuple[{', '.join(['jax.Array'] * found)}]`"
            )
        return out

    return lowered


def _meta(overload, fn):
    """Shapes and dtypes for fake tensors (torch.compile) and signatures, by jax.eval_shape."""

    def kernel(*args, **kwargs):
        spots = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]

        def run(arrays):
            arrays = iter(arrays)
            filled = [next(arrays) if isinstance(a, torch.Tensor) else a for a in args]
            return fn(*filled, **{k: next(arrays) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})

        shapes = jax.eval_shape(run, [jax.ShapeDtypeStruct(tuple(t.shape), dtypes.to_jax(t.dtype)) for t in spots])
        found = lowering.flat(shapes, [])
        made = [torch.empty(s.shape, dtype=dtypes.to_torch(s.dtype), device="meta") for s in found]
        return made[0] if len(overload._schema.returns) == 1 else tuple(made)

    return kernel
