"""The process in which XLA:TPU runs: `python -P aot_child.py request.json`. Only jax is imported, nothing of ours.

XLA writes what the parent wants to the dump folder long before it has machine code, so the parent reads that and
ends this process (tpu_lab/aot_compiler.py). What goes wrong is left in `failed.json`: {"kind", "message"}.

Request: {"program": MLIR bytecode, "topology", "bounds": chips a host or null, "partitions", "options": XLA's,
"out": folder for our files, "deep": run to the end and leave the machine code's HLO in `deep.txt`}.
"""

from __future__ import annotations

import json
import os
import sys

STACK = 512 << 20  # bytes; XLA:TPU's code generation is deeply recursive and has overflowed the usual 8 MiB


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    _end_with_parent()
    if request["deep"] and "TPU_LAB_CHILD_STACK" not in os.environ:
        _restart_with_stack()
    try:
        import libtpu  # noqa: F401  (jax finds it by itself; its absence has a sentence of its own)
    except ImportError as error:
        return _failed(request, "no libtpu", str(error))
    try:
        _compile(request)
    except MemoryError:
        return _failed(request, "host memory", "the machine's own memory is full")
    except Exception as error:  # whatever XLA says is for the parent to put in words
        return _failed(request, type(error).__name__, str(error))
    return 0


def _compile(request: dict) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)  # jax cannot read such entries back
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    bounds = {"chips_per_host_bounds": tuple(request["bounds"])} if request["bounds"] else {}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"], **bounds)
    many = request["partitions"]
    devices = topology.devices[:many]
    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=many,
        device_assignment=np.array([[d.id for d in devices]]),
        env_options_overrides=request["options"] or None,
        backend=client,
    )
    _write(request, "started.json", json.dumps({"devices": len(topology.devices), "kind": devices[0].device_kind}))
    with mlir.make_ir_context():
        with open(request["program"], "rb") as file:
            module = ir.Module.parse(file.read())
        made = client.compile(
            module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options
        )
    if request["deep"]:
        _write(request, "deep.txt", "\n\n".join(m.to_string() for m in made.hlo_modules()))


def _write(request: dict, name: str, text: str) -> None:
    """Whole or not at all: the parent looks at the folder while we write."""
    path = os.path.join(request["out"], name)
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".part", path)


def _failed(request: dict, kind: str, message: str) -> int:
    _write(request, "failed.json", json.dumps({"kind": kind, "message": message}))
    return 3


def _end_with_parent() -> None:
    """If the parent is killed, so are we: Linux sends the signal (prctl PR_SET_PDEATHSIG)."""
    import ctypes
    import signal

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):  # no Linux: libtpu is not there either
        pass


def _restart_with_stack() -> None:
    """The same process image again with a larger stack, which only exec can give to the main thread."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if most == resource.RLIM_INFINITY else min(STACK, most), most))
    os.environ["TPU_LAB_CHILD_STACK"] = "1"
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
