"""The command `tpu-lab`. Each subcommand is one function over parsed arguments that gives an exit code.

Only the standard library is imported at the top: `open`, `convert`, `doctor` and `version` run without PyTorch in this
process. `profile` and `convert` have files of their own.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tpu_lab import convert, coverage_command, jupyter, recorded, script, twins_run, wheelhouse

HOST = "127.0.0.1"  # the notebooks run any code: nobody but this machine's user may reach them


def main(argv: list[str] | None = None) -> int:
    """Run one command; gives the exit code: 0 fine, 1 something is broken, 2 wrong usage."""
    arguments = parser().parse_args(argv)
    return arguments.run(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="tpu-lab", description='A PyTorch device "tpu", and what each op cost.')
    top.add_argument("--version", action="version", version=version())
    commands = top.add_subparsers(required=True, metavar="command")

    opened = commands.add_parser("open", help="open the notebooks in the browser", description=open_lab.__doc__)
    opened.add_argument("path", nargs="?", type=Path, help="a notebook or a folder of notebooks (default: notebooks/)")
    opened.add_argument("--edit", action="store_true", help="open them to be changed, cell by cell, not as a gallery")
    opened.add_argument("--tutorials", action="store_true", help="open the tutorials, which are to be edited")
    opened.add_argument("--jupyter", action="store_true", help="open their Jupyter twins (.ipynb) in JupyterLab")
    opened.add_argument("--port", type=port_number, help="port on 127.0.0.1 (default: the first free one from 2718)")
    opened.add_argument("--headless", action="store_true", help="open no browser, only print the URL")
    opened.set_defaults(run=open_lab)

    examined = commands.add_parser("doctor", help="what is installed, which device, what is wrong and the way out")
    examined.add_argument("--json", action="store_true", help="print the findings as JSON")
    examined.add_argument("--chip", action="store_true", help="also take the TPU chip for a moment and run an op on it")
    examined.add_argument("--workshop", action="store_true", help="also what a workshop needs, with a smoke run")
    examined.set_defaults(run=doctor)

    measured = commands.add_parser("bench", help="what the backend costs beside native PyTorch and plain jax")
    measured.set_defaults(run=bench)

    for more in (script, convert, coverage_command, twins_run, recorded, wheelhouse):
        more.add(commands)

    told = commands.add_parser("version", help="print the version")
    told.set_defaults(run=lambda arguments: print(f"tpu-lab {version()}") or 0)
    return top


def version() -> str:
    """The installed version, or that of the source tree this file is in."""
    try:
        return metadata.version("tpu-lab")
    except metadata.PackageNotFoundError:
        import tomllib

        project = Path(__file__).parent.parent / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"] if project.exists() else "unknown"


def port_number(text: str) -> int:
    """A TCP port from the command line; argparse turns the ValueError or ArgumentTypeError into usage."""
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port, choose 1024 to 65535")
    return port


def open_lab(arguments: argparse.Namespace) -> int:
    """Serve the notebooks with marimo on 127.0.0.1, behind an access token; Ctrl-C stops it.

    A folder is a gallery of cards; with --edit it is a list of files whose cells can be changed. With --jupyter it is
    JupyterLab over their .ipynb twins.
    """
    wanted = "tutorials" if arguments.tutorials else "notebooks"
    if arguments.jupyter and not jupyter.is_installed():
        print(jupyter.MISSING, file=sys.stderr)
        return 1
    path = arguments.path or find_folder(wanted)
    if arguments.jupyter and arguments.path is None and path is not None:
        path = path / jupyter.FOLDER
    if path is None:
        print(
            f"tpu-lab: no folder {wanted}/ here: an installed wheel does not carry it.\n"
            f"Way out: get the source tree of TPU Lab, then run `make lab` in it, or give the folder: "
            f"tpu-lab open path/to/{wanted}",
            file=sys.stderr,
        )
        return 2
    if not path.exists():
        print(f"tpu-lab: {path} does not exist. Give a notebook (.py) or a folder of them.", file=sys.stderr)
        return 2
    if arguments.port and not port_is_free(arguments.port):
        print(
            f"tpu-lab: port {arguments.port} on {HOST} is taken or not allowed.\n"
            f"Way out: another one, `tpu-lab open --port {arguments.port + 1}`, or none, then a free one is found.",
            file=sys.stderr,
        )
        return 1
    port = arguments.port or next((p for p in range(2718, 2818) if port_is_free(p)), 2718)
    print(f"TPU Lab: {wanted if arguments.path is None else path}, served on {HOST} only. Ctrl-C stops it.")
    if arguments.headless:
        print(f"From another machine: ssh -N -L {port}:{HOST}:{port} <this machine>, then open the URL there.")
    token = secrets.token_urlsafe(24)
    if arguments.jupyter:
        return jupyter.serve(path, port, token, arguments.headless)
    print(f"In a few seconds at http://{HOST}:{port}/?access_token={token}", flush=True)
    how = ["edit"] if arguments.edit or arguments.tutorials else ["run", "--include-code"]
    command = [sys.executable, "-m", "marimo", "--quiet", "--log-level", "ERROR", *how]
    command += ["--no-sandbox", "--host", HOST, "--port", str(port)]
    command += ["--token", "--token-password-file", "-"]  # through stdin: other users can read a command line
    command += ["--skip-update-check"] if "edit" in how else []
    command += ["--headless"] if arguments.headless else []
    command.append(str(path.resolve()))
    if os.name != "posix":
        return subprocess.run(command, input=token.encode(), check=False).returncode
    ours, theirs = os.pipe()
    os.write(theirs, token.encode())
    os.close(theirs)
    os.dup2(ours, 0)
    os.execv(sys.executable, command)  # become marimo: signals and the exit code are then its own


def bench(arguments: argparse.Namespace) -> int:
    """Print the costs of small ops and of a training step, in ratios to native PyTorch; about a minute."""
    from tpu_lab import bench as figures

    print(figures.report())
    return 0


def find_folder(name: str) -> Path | None:
    """notebooks/ or tutorials/ beside the package (a source tree), else in the current folder, if it holds any .py."""
    for parent in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if any((parent / name).glob("*.py")):
            return parent / name
    return None


def port_is_free(port: int) -> bool:
    """Whether this process may listen on the port of 127.0.0.1 now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def doctor(arguments: argparse.Namespace) -> int:
    """Print what is installed and what is wrong; 1 when something is broken."""
    from tpu_lab import doctor as rounds

    findings = rounds.examine(use_chip=arguments.chip)
    if arguments.workshop:
        from tpu_lab import doctor_workshop

        findings += doctor_workshop.examine()
    print(rounds.as_json(findings) if arguments.json else rounds.as_text(findings))
    return 1 if any(f.status == "problem" for f in findings) else 0
