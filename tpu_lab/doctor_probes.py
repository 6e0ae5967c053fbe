"""What `tpu-lab doctor` can tell from files, metadata and the environment alone, one probe a subject.

A probe takes a `Machine`, which tests can fake, and gives findings. None imports torch or jax, none takes a TPU chip.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tpu_lab.backend.chip_files import device_files, find_holders, has_chip, pci_chips


@dataclass(frozen=True)
class Finding:
    """One thing looked at. fix is the way out, where one is needed."""

    name: str
    status: str  # "ok", "note" (worth knowing) or "problem" (something is broken)
    text: str
    fix: str = ""


def installed_version(package: str) -> str | None:
    """The installed version of a package, None when it is not there. Reads metadata, imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def declared_requirements(package: str) -> list[str]:
    """The requirement strings of an installed package; for tpu-lab in a source tree those of its pyproject.toml."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        import tomllib

        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        if package != "tpu-lab" or not project.exists():
            return []
        return tomllib.loads(project.read_text())["project"]["dependencies"]


@dataclass(frozen=True)
class Machine:
    """What the probes look at: a file system root, the environment, the installed packages."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    version: Callable[[str], str | None] = installed_version
    requires: Callable[[str], list[str]] = declared_requirements
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])


# ---- packages ------------------------------------------------------------------------------------------------------


def python(machine: Machine) -> list[Finding]:
    """Python 3.11 or newer."""
    found = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        return [Finding("python", "problem", f"{found} is too old", "install Python 3.11 or newer, then `make lab`")]
    return [Finding("python", "ok", f"{found} ({sys.executable})")]


def packages(machine: Machine) -> list[Finding]:
    """The packages that the lab rests on, against the ranges it was written for."""
    ranges = {r.name: r.specifier for r in parsed(machine.requires("tpu-lab")) if not r.marker}
    return [against(name, machine.version(name), ranges.get(name)) for name in ("torch", "jax", "jaxlib", "marimo")]


def against(name: str, found: str | None, wanted) -> Finding:
    """One package's version against a specifier set (None: any version will do)."""
    if found is None:
        return Finding(name, "problem", "not installed", "`make lab`, or `pip install tpu-lab`")
    if wanted is not None and not wanted.contains(found, prereleases=True):
        return Finding(name, "problem", f"{found} is outside {wanted}", f'pip install "{name}{wanted}"')
    return Finding(name, "ok", found)


def parsed(requirements: list[str]) -> list:
    """Requirement strings as packaging's objects."""
    from packaging.requirements import Requirement

    return [Requirement(r) for r in requirements]


def pairing(machine: Machine) -> list[Finding]:
    """jax says itself which jaxlib and libtpu it goes with; a wrong libtpu fails in hard-to-read ways."""
    jax = machine.version("jax")
    if jax is None:
        return []
    findings = []
    requirements = parsed(machine.requires("jax"))
    for r in requirements:
        jaxlib = machine.version("jaxlib")
        if r.name == "jaxlib" and not r.marker and jaxlib and not r.specifier.contains(jaxlib, prereleases=True):
            text, fix = f"jaxlib {jaxlib} does not go with jax {jax} ({r.specifier})", f'pip install "jax=={jax}"'
            findings.append(Finding("jaxlib pairing", "problem", text, fix))
    of_tpu = [r for r in requirements if r.name == "libtpu" and r.marker and r.marker.evaluate({"extra": "tpu"})]
    libtpu = machine.version("libtpu")
    fix = f'pip install "jax[tpu]=={jax}"'
    if libtpu is None:
        status = "problem" if has_chip(machine.root) else "ok"
        text = "not installed; only a TPU chip and the TPU compiler's view need it"
        findings.append(Finding("libtpu", status, text, fix if status == "problem" else ""))
    elif of_tpu and not of_tpu[0].specifier.contains(libtpu, prereleases=True):
        findings.append(
            Finding("libtpu", "problem", f"{libtpu} does not go with jax {jax} ({of_tpu[0].specifier})", fix)
        )
    else:
        findings.append(Finding("libtpu", "ok", f"{libtpu}, goes with jax {jax}"))
    return findings


def torch_tpu(machine: Machine) -> list[Finding]:
    """torch_tpu registers "tpu" by itself at `import torch`, and only one backend can own the name in a process."""
    found = machine.version("torch_tpu")
    if found is None:
        return [Finding("torch_tpu", "ok", 'not installed: "tpu" is free for the lab')]
    if machine.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return [Finding("torch_tpu", "ok", f"{found} is installed, and kept out by TORCH_DEVICE_BACKEND_AUTOLOAD=0")]
    text = f'{found} is installed and takes the name "tpu" at `import torch`'
    return [Finding("torch_tpu", "problem", text, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment chooses the lab")]


# ---- the chip -------------------------------------------------------------------------------------------------------


def chip(machine: Machine) -> list[Finding]:
    """TPU chips on this machine, and whether they can be reached."""
    files, bus = device_files(machine.root), pci_chips(machine.root)
    names = ", ".join("/" + str(p.relative_to(machine.root)) for p in files)
    if bus and not files:
        text = f"{len(bus)} TPU chip(s) ({bus[0]}) on the PCI bus, but no /dev/accel* or /dev/vfio/*"
        return [Finding("chip", "problem", text, "in a container: run it with --privileged, or pass the device files")]
    if not has_chip(machine.root):
        return [Finding("chip", "ok", "no TPU here" + (f" ({names} serve something else)" if files else ""))]
    shut = [p for p in files if not os.access(p, os.R_OK | os.W_OK)]
    if shut:
        fix = "run as the group that owns the file (`ls -l`), or as root"
        return [Finding("chip", "problem", f"{names}: no right to open /{shut[0].relative_to(machine.root)}", fix)]
    return [Finding("chip", "ok", f"{len(bus) or len(files)} TPU chip(s){f' ({bus[0]})' if bus else ''}: {names}")]


def holders(machine: Machine) -> list[Finding]:
    """The processes that have a chip's file open: one process owns a chip at a time."""
    if not has_chip(machine.root):
        return []
    owners, hidden = find_holders(machine.root)
    fix = "end it (a notebook kernel holds its chip until it is shut down), or set TPU_LAB_PLATFORM=cpu here"
    found = [f"process {pid} ({name}) has {file} open" for pid, name, file in owners]
    if hidden and not owners:
        text = f"nobody seen, but {hidden} processes of other users could not be looked into"
        return [Finding("chip holder", "note", text, "`sudo tpu-lab doctor` sees them all")]
    if found:
        return [Finding("chip holder", "problem", text, fix) for text in found]
    return [Finding("chip holder", "ok", "nobody: the chip is free")]


def lockfile(machine: Machine) -> list[Finding]:
    """/tmp/libtpu_lockfile is left behind by a killed process, and then every later one is refused."""
    lock = machine.root / "tmp" / "libtpu_lockfile"
    if not lock.exists() or find_holders(machine.root)[0]:
        return []
    text = f"/tmp/libtpu_lockfile of {owner(lock)} is there, and nobody is seen with the chip"
    return [Finding("chip lock", "note", text, "if libtpu says it is in use: rm /tmp/libtpu_lockfile")]


def owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError, NotImplementedError):
        return "an unknown user"


def platform(machine: Machine) -> list[Finding]:
    """Which XLA platform runs the device "tpu", and why."""
    name, why = chosen_platform(machine)
    if name not in ("cpu", "tpu"):
        return [Finding("platform", "problem", f"{name!r} ({why})", "use cpu or tpu, or unset TPU_LAB_PLATFORM")]
    if name == "tpu" and not has_chip(machine.root):
        return [Finding("platform", "problem", f"tpu ({why}), but there is no TPU chip", "unset TPU_LAB_PLATFORM")]
    return [Finding("platform", "ok", f"{name}: {why}")]


def chosen_platform(machine: Machine) -> tuple[str, str]:
    """(platform, reason), by the rule of backend/platform.py: TPU_LAB_PLATFORM, else a chip, else the CPU."""
    asked = machine.environ.get("TPU_LAB_PLATFORM", "").strip().lower()
    if asked:
        return asked, "TPU_LAB_PLATFORM says so"
    if has_chip(machine.root):
        return "tpu", "a TPU chip is here (TPU_LAB_PLATFORM=cpu chooses the CPU)"
    return "cpu", "no TPU chip is here, XLA compiles for the CPU"


ALL = (python, packages, pairing, torch_tpu, chip, holders, lockfile, platform)
