"""The README's first screen is true: its ten lines print what it says, its pictures, files and commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(language):
    """The first fenced block of a language."""
    return re.search(rf"```{language}\n(.*?)```", README, re.S)[1]


def test_the_ten_lines_print_exactly_what_the_readme_says(tmp_path):
    code = block("python")
    assert len(code.splitlines()) == 10
    file = tmp_path / "ten_lines.py"
    file.write_text(code)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block("text")


def test_pictures_and_files_that_it_names_exist():
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"`((?:notebooks|tpu_lab)/[\w/.]*)`", README)
    named += re.findall(r'src(?:set)?="([^"]+)"', README)
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_its_commands_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), f"no target {target}"
    first_screen = README[: README.index("<picture>")]
    assert "make lab" in first_screen and "make test" in first_screen


def test_its_modes_are_the_modes():
    import torch

    import tpu_lab  # noqa: F401  registers torch.tpu

    for name in re.findall(r"\| `(DEFER_\w+)`", README):
        assert hasattr(torch.tpu.EagerMode, name)
    assert torch.tpu.eager_mode == torch.tpu.EagerMode.DEFER_NEVER
