"""torch.compile on "tpu": a Dynamo backend over AOTAutograd, lowered by the same table into the same cache.

`torch.compile(model, backend="tpu")`, and plain `torch.compile(model)` or `backend="inductor"` when an input lies on
"tpu": Inductor has no code for this device. CPU users see no change: the choice is made from the graph that Dynamo
hands over, and without a tensor on "tpu" the original Inductor call goes on untouched.

How it hooks in, least invasive first: `import tpu_lab` must not import torch._dynamo (seconds), so nothing is registered
then. `torch.compile` makes one of two small objects of class `torch._TorchCompileWrapper` (a named backend) or
`torch._TorchCompileInductorWrapper` (the default); their `__init__` is wrapped to call `ready()` first, which registers
the backend and tells Dynamo not to trace into this package and jax; the latter's `__call__` chooses by device.

AOTAutograd makes the graph functional, keeps writes to inputs as `copy_` at the end, and splits forward and backward.
A learning rate that changes is best a tensor, `lr=torch.tensor(0.1)`, as everywhere with torch.compile: Dynamo makes a
float of an optimizer a constant, traces again for each value, and gives up after eight.

Activations cheap to recompute are recomputed (min-cut); random ops never are, so dropout masks agree.
"""

from __future__ import annotations

import functools
import operator
import re
import sys

import torch

KNOWN = ("async_compile", "num_dynamic_buckets", "bucket_size", "serializable", "debug_callback", "name")
"""TorchTPU's option keys. Here `name` names the program, and `debug_callback(graph_module)` is called with each graph;
the others change nothing: programs are always in the disk tier, compiled when first called, once for each shape."""
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_SKIP = ("jax", "jaxlib", "numpy", "ml_dtypes", "tpu_lab.trace", "tpu_lab.profile")


class UnknownOption(RuntimeError):
    """`torch.compile(options=...)` has a key that backend "tpu" does not know."""


def backend(gm: torch.fx.GraphModule, example_inputs, *, mode: str | None = None, options: dict | None = None):
    """The Dynamo backend "tpu": an FX graph and fake inputs -> a callable.

    mode: any of torch.compile's; XLA has one way to compile, so it changes nothing. options: see KNOWN.
    UnknownOption, or ValueError for an unknown mode. A graph without a tensor on "tpu" runs as it is.
    """
    ready()
    if mode not in (None, *MODES):
        raise ValueError(f"torch.compile(mode={mode!r}): use one of {', '.join(MODES)}")
    options = check(options)
    if not on_tpu(gm, example_inputs):
        return gm.forward
    from tpu_lab.backend import forget

    forget.sweep()
    return _compile(gm, example_inputs, options)


def check(options: dict | None) -> dict:
    """The options with "_" for "-". UnknownOption names the known ones."""
    options = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    for key in options:
        if key not in KNOWN:
            raise UnknownOption(
                f'torch.compile(backend="tpu") has no option {key!r}: it takes {", ".join(KNOWN)}. For options of the XLA '
                "compiler use torch.tpu.compiler.custom_compiler_options({...}) around the first call"
            )
    return options


def on_tpu(gm: torch.fx.GraphModule, example_inputs) -> bool:
    """Does the graph see a tensor on "tpu": an input, a parameter, or one it makes?"""

    def found(value) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(found, value))
        return isinstance(value, torch.Tensor) and value.device.type == "tpu"

    if found(list(example_inputs)):
        return True
    return any(found(node.meta.get("example_value", node.meta.get("val"))) for node in gm.graph.nodes)


def _compile(gm, example_inputs, options):
    from torch._dynamo.backends.common import aot_autograd

    from tpu_lab.backend.compiled import CompiledGraph
    from tpu_lab.backend.compiled_records import Link

    name, link = options.get("name", ""), Link(_retrace_reason(), _input_names(gm))
    donatable: list[int] = []

    def compiler(phase):
        def compile_graph(graph, inputs):
            if callable(options.get("debug_callback")):
                options["debug_callback"](graph)
            if phase == "forward":
                donatable[:] = _dying_activations()
            return CompiledGraph(graph, phase, name, donatable if phase == "backward" else (), link=link).boxed()

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def _retrace_reason() -> str:
    """Why Dynamo traces a function that it has traced before, in its own words; "" the first time."""
    from torch._dynamo.utils import get_metrics_context

    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return reason if isinstance(reason, str) else ""


def _input_names(gm) -> list[str]:
    """What the user calls each input of the graph: "x" for L['x'], "net.weight" for G['net']._parameters['weight']."""
    names = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", None)
            text = source if isinstance(source, str) else node.name
            text = re.sub(r"\._(modules|parameters|buffers)\b", "", re.sub(r"^[LG]\['(?:self'\]\.?)?", "['", text))
            names.append(re.sub(r"\['([\w.]+)'\]", r".\1", text).lstrip("['."))
    return names


def _partition(joint, inputs, **kwargs):
    """Min-cut, with random ops saved also where torch.utils.checkpoint asks to compute all again: masks must agree."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if "recompute" in node.meta and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            for part in (node, *(user for user in node.users if user.target is operator.getitem)):
                part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def _dying_activations() -> list[int]:
    """Backward arguments that only autograd holds: their memory may be taken, unless the user keeps the graph.

    AOTAutograd works them out for Inductor, and then refuses `backward(retain_graph=True)`. We look at the reference
    counts of each call instead (`compiled.py`), so its list is taken over and emptied.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or not metadata.bw_donated_idxs:
        return []
    found, metadata.bw_donated_idxs = list(metadata.bw_donated_idxs), []
    return found


# --- the way in -----------------------------------------------------------------------------------------------------


@functools.cache
def ready() -> None:
    """Make Dynamo know the backend and leave our own code and jax alone. Imports torch._dynamo: seconds, the first time."""
    from torch._dynamo import decorators, trace_rules
    from torch._dynamo.backends import registry

    from tpu_lab.backend import compile_hooks, compiled, meta, where  # noqa: F401  (compiled: loaded, so it is skipped below)

    if "tpu" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="tpu")
    meta.tell_fake_tensors()
    ours = [m for name, m in list(sys.modules.items()) if name.startswith("tpu_lab.backend.") and m is not compile_hooks]
    for name in (*_SKIP, *(m.__name__ for m in ours)):
        trace_rules.add(name)
    decorators.substitute_in_graph(where.enter)(compile_hooks.enter)
    decorators.substitute_in_graph(where.leave)(compile_hooks.leave)
    for module in ours:
        for value in vars(module).values():
            for member in (value, *(vars(value).values() if isinstance(value, type) else ())):
                if getattr(member, "__module__", None) == module.__name__ and hasattr(member, "__code__"):
                    _never_trace(member.__code__)


def _never_trace(code) -> None:
    """Between two graphs Dynamo looks at every new frame, and torch's C++ calls our kernels: it skips these and all they
    call (jax, numpy, generated code that trace_rules cannot name)."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    for inner in code.co_consts:
        if hasattr(inner, "co_code"):
            _never_trace(inner)


def install() -> None:
    """Wrap torch.compile's two wrapper classes. Called once, when the device is registered."""
    named, default = torch._TorchCompileWrapper, torch._TorchCompileInductorWrapper
    named_init, default_init, default_call = named.__init__, default.__init__, default.__call__

    @functools.wraps(named_init)
    def init_named(self, *args, **kwargs):
        ready()
        given = dict(zip(("backend", "mode", "options"), args, strict=False)) | kwargs
        if given.get("backend") == "tpu":
            check(given.get("options"))  # at the call of torch.compile rather than at the first call of the function
        named_init(self, *args, **kwargs)

    @functools.wraps(default_init)
    def init_default(self, mode, options, dynamic, *args, **kwargs):
        ready()
        ours = {k: v for k, v in (options or {}).items() if k.replace("-", "_") in KNOWN}
        theirs = {k: v for k, v in (options or {}).items() if k not in ours}
        default_init(self, mode, theirs, dynamic, *args, **kwargs)
        self.tpu_options = ours

    @functools.wraps(default_call)
    def call_default(self, model_, inputs_, **kwargs):
        ours = getattr(self, "tpu_options", {})
        if on_tpu(model_, inputs_):
            return backend(model_, inputs_, options=ours)
        if ours:
            self.apply_options(ours)  # Inductor's own error for keys it does not know
        return default_call(self, model_, inputs_, **kwargs)

    named.__init__, default.__init__, default.__call__ = init_named, init_default, call_default
    if "torch._dynamo" in sys.modules:
        ready()
