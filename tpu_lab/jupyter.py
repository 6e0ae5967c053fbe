"""`tpu-lab open --jupyter`: JupyterLab over the .ipynb twins. Standard library only; JupyterLab is a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

HOST, FOLDER = "127.0.0.1", "jupyter"  # where the twins stand, in the folder of the notebooks
MISSING = (
    "tpu-lab: JupyterLab is not installed here.\n"
    "Way out: `pip install 'tpu-lab[jupyter]'`, in a source tree `.venv/bin/python -m pip install -c constraints.txt -e '.[jupyter]'`"
)


def is_installed() -> bool:
    """Whether JupyterLab and a kernel for it are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("jupyterlab", "ipykernel"))


def command(path: Path, port: int, headless: bool) -> list[str]:
    """The command line that serves a folder, or a notebook in its folder. The token is no part of it: others can read it."""
    folder = path if path.is_dir() else path.parent
    options = {
        "ServerApp.ip": HOST,
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder.resolve(),
        "ServerApp.open_browser": not headless,
        "ServerApp.allow_remote_access": False,
        "ServerApp.quit_button": True,
        "ServerApp.default_url": page(path),
        "ServerApp.log_level": "ERROR",
        "ServerApp.allow_root": hasattr(os, "geteuid")
        and os.geteuid() == 0,  # as in a container; only this machine gets in
        # it asks nobody outside: no news, no list of extensions
        "LabApp.news_url": "",
        "LabApp.extension_manager": "readonly",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    return [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def page(path: Path) -> str:
    """The part of the URL behind the port."""
    return "/lab" if path.is_dir() else "/lab/tree/" + quote(path.name)


def serve(path: Path, port: int, token: str, headless: bool) -> int:
    """Say where, and become JupyterLab; gives its exit code where a process cannot become another."""
    print(f"In a few seconds at http://{HOST}:{port}{page(path)}?token={token}", flush=True)
    environment = {**os.environ, "JUPYTER_TOKEN": token}
    if os.name != "posix":
        return subprocess.run(command(path, port, headless), env=environment, check=False).returncode
    os.execve(sys.executable, command(path, port, headless), environment)
