"""`tpu-lab wheelhouse DIR`: a folder from which learners install without a network, from a stick or a share.

It holds wheels of the exact releases in constraints.txt, the lab's own among them, the notebooks and tutorials, and a
README.txt with the two commands. Standard library only; pip does the work.
"""

from __future__ import annotations

import argparse
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
EXTRAS = ("jupyter", "tpu")
LESSONS = ("notebooks", "tutorials")

README = """\
TPU Lab, to be installed without a network
==========================================

These wheels are for Python {python} on {system}: {count} files, {size}.

    python{python} -m venv tpu-lab
    tpu-lab/bin/python -m pip install --no-index --find-links wheels -c constraints.txt "{wanted}"

Both in this folder, or in a copy of it. Then:

    tpu-lab/bin/tpu-lab doctor --workshop
    tpu-lab/bin/tpu-lab open --tutorials

The second opens tutorials/ of this folder; `tpu-lab/bin/tpu-lab open` opens notebooks/.
"""


def add(commands) -> None:
    """The grammar of `tpu-lab wheelhouse`."""
    it = commands.add_parser("wheelhouse", help="a folder to install from without a network", description=make.__doc__)
    it.add_argument("folder", type=Path, help="the folder to fill")
    it.add_argument("--extra", action="append", choices=EXTRAS, default=[], help="also what this extra needs")
    it.add_argument(
        "--torch-index", metavar="URL", help="a further index, such as PyTorch's of CPU builds (see the Makefile)"
    )
    it.add_argument("--dry-run", action="store_true", help="only print pip's command")
    it.set_defaults(run=make)


def make(arguments: argparse.Namespace) -> int:
    """Fill a folder with wheels of the exact releases for this platform and Python, the lessons, and a README.txt."""
    if not (SOURCE / "constraints.txt").exists():
        print(
            "tpu-lab wheelhouse: the exact releases are in constraints.txt, which an installed wheel does not carry.\n"
            "Way out: run it in a copy of the source tree of TPU Lab.",
            file=sys.stderr,
        )
        return 2
    wheels = arguments.folder / "wheels"
    collect = command(wheels, arguments.extra, arguments.torch_index)
    print(shlex.join(collect), flush=True)
    if arguments.dry_run:
        return 0
    try:
        wheels.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"tpu-lab wheelhouse: {wheels} cannot be made: {error.strerror}. Way out: name a folder of yours.", file=sys.stderr)
        return 2
    if subprocess.run(collect, check=False).returncode:
        print(
            "tpu-lab wheelhouse: pip could not collect the wheels, see above. It needs a network, once.",
            file=sys.stderr,
        )
        return 1
    lay_out(arguments.folder, arguments.extra)
    if subprocess.run(rehearsal(arguments.folder, arguments.extra), stdout=subprocess.DEVNULL, check=False).returncode:
        print("tpu-lab wheelhouse: without a network pip would not find all of it, see above.", file=sys.stderr)
        return 1
    files = sorted(wheels.glob("*.whl"), key=lambda file: -file.stat().st_size)
    for file in files[:5]:
        print(f"  {written(file.stat().st_size):>8}  {file.name}")
    print(f"  {written(sum(file.stat().st_size for file in files)):>8}  in all, {len(files)} wheels")
    print(
        f"Wrote {arguments.folder}: pip finds everything in it. How learners install: {arguments.folder / 'README.txt'}"
    )
    return 0


def wanted(extras: list[str]) -> str:
    """The requirement that learners install."""
    return "tpu-lab" + (f"[{','.join(dict.fromkeys(extras))}]" if extras else "")


def command(wheels: Path, extras: list[str], torch_index: str | None = None) -> list[str]:
    """pip's command that makes a wheel of the lab and gets one of each package that it needs, at the pinned releases.

    `pip wheel` and not `pip download`: what is published as source only is made a wheel here, and not by each learner.
    """
    what = str(SOURCE) + wanted(extras).removeprefix("tpu-lab")
    index = ["--extra-index-url", torch_index] if torch_index else []
    pins = ["--constraint", str(SOURCE / "constraints.txt")]
    return [*_pip("wheel"), "--wheel-dir", str(wheels), *pins, *index, what]


def rehearsal(folder: Path, extras: list[str]) -> list[str]:
    """The learners' command, without installing."""
    there = ["--no-index", "--find-links", str(folder / "wheels"), "--constraint", str(folder / "constraints.txt")]
    return [*_pip("install"), "--dry-run", "--ignore-installed", "--quiet", *there, wanted(extras)]


def _pip(verb: str) -> list[str]:
    return [sys.executable, "-m", "pip", verb, "--disable-pip-version-check"]


def lay_out(folder: Path, extras: list[str]) -> None:
    """Put the pins, the lessons, marimo's settings and the README.txt beside the wheels."""
    shutil.copy(SOURCE / "constraints.txt", folder)
    settings = re.findall(r"^\[tool\.marimo\.[^\[]*", (SOURCE / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    (folder / "pyproject.toml").write_text("".join(settings), encoding="utf-8")
    for name in LESSONS:
        ignored = shutil.ignore_patterns("__pycache__", "session", ".ipynb_checkpoints")
        shutil.copytree(SOURCE / name, folder / name, ignore=ignored, dirs_exist_ok=True)
    files = list((folder / "wheels").glob("*.whl"))
    text = README.format(
        python=".".join(map(str, sys.version_info[:2])),
        system=f"{platform.system()} {platform.machine()}",
        count=len(files),
        size=written(sum(file.stat().st_size for file in files)),
        wanted=wanted(extras),
    )
    (folder / "README.txt").write_text(text, encoding="utf-8")


def written(size: int) -> str:
    """Bytes as MB, as file managers count them."""
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
