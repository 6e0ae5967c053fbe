"""Ask XLA:TPU about a program, without a TPU: libtpu compiles ahead of time in a child process (aot_child.py).

The child never shares the notebook's process: libtpu would try to start a chip, a full compile takes up to minutes and
has crashed, and Ctrl-C must end it at once. XLA dumps the scheduled HLO and the buffer assignment long before machine
code; when both are there and have not changed for half a second, we read them and end the child.

Answers are kept in the disk tier of the compile cache (backend/disk.py: each entry verified), keyed by the program,
versions, topology and options: jax's own cache cannot read ahead-of-time TPU programs back.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from tpu_lab.targets import Target

LIMIT = 300.0  # seconds a compile may take; deep=True often needs them
SETTLED = 0.5  # seconds the dump must stay as it is
_FORMAT = 1  # of what is stored
_HLO, _BUFFERS = "*.after_optimizations_after_buffer_assignment.txt", "*.after_optimizations-buffer-assignment.txt"
_REFUSED = "*.after_optimizations.txt"  # what there is of a program that does not fit
_CHILD = Path(__file__).with_name("aot_child.py")
MISSING = (
    'the TPU compiler is not installed: pip install "tpu-lab[tpu]" brings jax[tpu] with its libtpu '
    "(Linux on x86-64, no TPU needed)"
)


class CompileError(RuntimeError):
    """XLA:TPU gave no answer: one sentence that says why, and the way out."""


@dataclass(frozen=True)
class Answer:
    """What XLA:TPU says of one program. hlo, buffers: its texts, also of one that does not fit ("" if it left none)."""

    hlo: str
    buffers: str
    deep: str  # HLO after code generation, with `estimated_cycles`; "" unless asked for
    refused: str  # the compiler's RESOURCE_EXHAUSTED message, "" if there was none
    libtpu: str
    jax: str
    seconds: float  # the compile took
    cached: bool = False  # read back from disk


def versions() -> tuple[str, str]:
    """(jax, libtpu); CompileError when libtpu is not installed."""
    try:
        return importlib.metadata.version("jax"), importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(MISSING) from None


def ask(program: bytes, target: Target, options: dict | None = None, deep: bool = False, limit: float | None = None, partitions: int = 1) -> Answer:  # fmt: skip
    """The answer for a program (MLIR bytecode of StableHLO, locations included), from disk or from the compiler.

    options: XLA options of the program. deep: go on to machine code, for `estimated_cycles`. limit: seconds.
    partitions: devices that the program is split over. CompileError in all cases without an answer.
    """
    jax, libtpu = versions()
    options = options or {}
    about = (_FORMAT, jax, libtpu, target.topology, target.bounds, partitions, sorted(options.items()), deep)
    key = f"aot {hashlib.blake2b(program, digest_size=20).hexdigest()} {about!r}"
    found = _stored(key)
    if found is not None:
        return found
    limit = LIMIT if limit is None else limit
    folder = Path(tempfile.mkdtemp(prefix="tpu_lab_"))
    try:
        start = time.monotonic()
        request = {
            "program": str(folder / "program.mlir"), "topology": target.topology, "bounds": target.bounds,
            "partitions": partitions, "options": options, "out": str(folder), "deep": deep,
        }  # fmt: skip
        (folder / "program.mlir").write_bytes(program)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        hlo, buffers, code, refused = _run(folder, target, deep, limit)
        answer = Answer(hlo, buffers, code, refused, libtpu, jax, round(time.monotonic() - start, 2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _store(key, answer)
    return answer


def _run(folder: Path, target: Target, deep: bool, limit: float) -> tuple[str, str, str, str]:
    """(HLO, buffer assignment, HLO after code generation, refusal). The child is gone when this returns or raises."""
    (folder / "dump").mkdir()
    with open(folder / "stderr.txt", "wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(folder / "request.json")],
            env=_environment(folder / "dump"), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            start_new_session=True,  # Ctrl-C in a terminal is ours to handle, then we end the child
        )  # fmt: skip
    progress = _Progress(f"XLA:TPU compiles for {target.name}")
    begun, seen, since = time.monotonic(), None, 0.0
    try:
        while True:
            ended = child.poll()
            now = time.monotonic()
            dump = _dumped(folder / "dump")
            if dump is not None and not deep:
                if dump != seen:
                    seen, since = dump, now
                elif now - since >= SETTLED or ended is not None:
                    return (*_texts(folder / "dump"), "", "")
            if ended is not None:
                return _ended(folder, ended, deep, target)
            if now - begun > limit:
                more = "without deep=True it stops before code generation" if deep else "a smaller program is quicker"
                raise CompileError(
                    f"XLA:TPU did not finish within {limit:g} s for {target.name}: give limit= more seconds; {more}"
                )
            progress.tick(now - begun)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        progress.end()


def _ended(folder: Path, code: int, deep: bool, target: Target) -> tuple[str, str, str, str]:
    """The child ended by itself: all is done (deep), it said why not, or it crashed."""
    failed = folder / "failed.json"
    if failed.is_file():
        why = json.loads(failed.read_text(encoding="utf-8"))
        if "RESOURCE_EXHAUSTED" in why["message"]:
            return (*_texts(folder / "dump", _REFUSED), "", why["message"])
        raise CompileError(_words(why["kind"], why["message"], target))
    if code == 0 and _dumped(folder / "dump") is not None:
        done = folder / "deep.txt"
        return (*_texts(folder / "dump"), done.read_text(encoding="utf-8") if deep else "", "")
    if code == 0:
        raise CompileError(f"libtpu compiled for {target.name} and dumped nothing: this libtpu does not know --xla_dump_to")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = ": without deep=True it stops before code generation, where crashes are known" if deep else ""
    said = _last_line((folder / "stderr.txt").read_text(encoding="utf-8", errors="replace"))
    raise CompileError(
        f"the TPU compiler's process {how} while compiling for {target.name}{hint}"
        + (f"; it said: {said}" if said else "; this process is unharmed")
    )


def _words(kind: str, message: str, target: Target) -> str:
    first = message.strip().splitlines()[0][:400] if message.strip() else kind
    if kind == "no libtpu":
        return MISSING
    if kind == "host memory":
        return f"this machine ran out of memory while XLA:TPU compiled for {target.name}: close what you do not need"
    if "opology" in first and "INVALID_ARGUMENT" in message:
        return f"libtpu knows no topology {target.topology!r}: {first}"
    if kind in ("ImportError", "ModuleNotFoundError", "AttributeError"):
        return f"jax and libtpu do not fit together ({kind}: {first}): {MISSING}"
    return f"XLA:TPU refused the program for {target.name}: {first}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("    ")]
    wanted = [line for line in lines if re.search(r"Error|FATAL|Check fail|SIG[A-Z]+|overflow", line)]
    return (wanted or lines or [""])[-1][:300]


def _environment(dump: Path) -> dict[str, str]:
    """For a child that compiles only: no chip is looked for, nothing is logged, the user's CPU flags stay out."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_", "TPU_"))}
    return {
        **kept, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-1",
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2", "TMPDIR": str(dump.parent), "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    }  # fmt: skip


def _dumped(dump: Path) -> tuple | None:
    """What identifies the two files as they are now; None until both are there."""
    found = [sorted(dump.glob(pattern)) for pattern in (_HLO, _BUFFERS)]
    if not all(found):
        return None
    try:
        return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for files in found for f in files)
    except OSError:
        return None


def _texts(dump: Path, hlo: str = _HLO) -> tuple[str, str]:
    """(HLO, buffer assignment) of the largest module: a program may bring small ones along. "" for what is not there."""
    found = [max(dump.glob(p), key=lambda f: f.stat().st_size, default=None) for p in (hlo, _BUFFERS)]
    one, other = (f.read_text(encoding="utf-8", errors="replace") if f else "" for f in found)
    return one, other


def _stored(key: str) -> Answer | None:
    from tpu_lab.backend import disk

    data = disk.tier.get(key) if disk.tier is not None else None
    if data is None:
        return None
    try:
        return Answer(**{**json.loads(zlib.decompress(data)), "cached": True})
    except (ValueError, TypeError, zlib.error):  # of another version of ours
        return None


def _store(key: str, answer: Answer) -> None:
    from tpu_lab.backend import disk

    if disk.tier is not None:
        disk.tier.put(key, zlib.compress(json.dumps(asdict(answer)).encode(), 6))


class _Progress:
    """One line with the seconds so far, on a terminal or in a notebook; nothing where output is a file."""

    def __init__(self, words: str):
        self._words, self._shown = words, -1
        self._out = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else sys.stdout if _notebook() else None

    def tick(self, seconds: float) -> None:
        """Show the whole seconds once the first two are over."""
        if self._out is not None and int(seconds) > max(self._shown, 1):
            self._shown = int(seconds)
            self._out.write(f"\r{self._words}: {self._shown} s ")
            self._out.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._out is not None and self._shown >= 0:
            self._out.write("\r" + " " * (len(self._words) + 10) + "\r")
            self._out.flush()


def _notebook() -> bool:
    """In a Jupyter kernel or a marimo cell? Neither is imported to find out."""
    if "ipykernel" in sys.modules and "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        return shell is not None and hasattr(shell, "kernel")
    if "marimo" in sys.modules:
        with contextlib.suppress(Exception):  # whatever marimo's version says: no progress line then
            return bool(sys.modules["marimo"].running_in_notebook())
    return False
