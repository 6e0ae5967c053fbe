"""The two commands and the package: what is installed, that a repetition installs nothing, what a wheel carries."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement


@pytest.fixture(scope="module")
def project(root):
    """pyproject.toml as a dict."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pins(root):
    """constraints.txt as {normal name: version}."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in rows}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(project, *extras):
    """The project's own requirements."""
    listed = list(project["project"]["dependencies"])
    for extra in extras:
        listed += project["project"]["optional-dependencies"][extra]
    return [Requirement(r) for r in listed]


def test_every_pin_is_inside_the_range_that_is_declared(project, pins):
    for requirement in needed(project, "test"):
        assert normal(requirement.name) in pins, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pins[normal(requirement.name)]), requirement


def test_everything_installed_through_the_requirements_is_pinned(project, pins):
    """Walks the installed packages from the project's requirements: none of them may float."""
    queue, seen = [(r.name, r.extras) for r in needed(project, "test")], set()
    while queue:
        name, extras = queue.pop()
        if (normal(name), frozenset(extras)) in seen:
            continue
        seen.add((normal(name), frozenset(extras)))
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # CUDA libraries, on a machine whose torch is the CPU build
            continue
        for requirement in map(Requirement, requires):
            environments = [{"extra": extra} for extra in (*extras, "")]
            if requirement.marker is None or any(requirement.marker.evaluate(e) for e in environments):
                queue.append((requirement.name, requirement.extras))
    floating = {name for name, _ in seen} - set(pins)
    assert not {name for name in floating if not name.startswith(("nvidia-", "cuda-", "triton"))}


def test_the_tests_run_with_the_pinned_versions(pins):
    for name in ("torch", "jax", "jaxlib", "marimo", "pandas", "pytest"):
        assert metadata.version(name).split("+")[0] == pins[name]


def test_the_package_tells_the_same_version(root, project):
    assert f'__version__ = "{project["project"]["version"]}"' in (root / "tpu_lab/__init__.py").read_text()


# ---- the Makefile --------------------------------------------------------------------------------------------------


def make(root, *arguments, check=True, **environ):
    """Run make with a plain environment; gives what it printed."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV", "PORT", "HEADLESS")
    }
    done = subprocess.run(
        ["make", *arguments], cwd=root, env={**kept, **environ}, capture_output=True, text=True, timeout=60
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def installed(tmp_path):
    """An environment folder as it is after `make test`: a Python and both stamps, newer than the requirements."""
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".lab-installed", ".test-installed"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_repetition_installs_nothing(root, installed):
    for target in ("lab", "test"):
        planned = make(root, "-n", target, f"VENV={installed}").stdout
        assert "pip install" not in planned and "venv" not in planned.replace(str(installed), "")
    assert f"{installed}/bin/python -m pytest" in planned


def test_changed_requirements_install_again(root, installed):
    os.utime(installed / ".test-installed", (0, 0))
    planned = make(root, "-n", "test", f"VENV={installed}").stdout
    assert "pip install" in planned and "-c constraints.txt" in planned and '".[test]"' in planned


def test_port_and_headless_reach_the_lab(root, installed):
    planned = make(root, "-n", "lab", f"VENV={installed}", "PORT=8123", "HEADLESS=1").stdout
    assert re.search(r"tpu-lab open --port 8123 --headless", planned)
    assert "--headless" not in make(root, "-n", "lab", f"VENV={installed}", "HEADLESS=0").stdout


def test_a_given_index_is_handed_to_pip(root, installed):
    os.utime(installed / ".lab-installed", (0, 0))
    planned = make(root, "-n", "lab", f"VENV={installed}", "TORCH_INDEX=https://example.org/cpu").stdout
    assert "--extra-index-url https://example.org/cpu" in planned


def fake_python(folder, name, version, venv=True):
    """An executable that answers the Makefile's questions as a Python of that version would."""
    path = folder / name
    path.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"  *print*) echo {version[0]}.{version[1]};;\n"
        f"  *sys.exit*) exit {int(version < (3, 11))};;\n"
        f"  *ensurepip*) exit {int(not venv)};;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_in_one_sentence(root, tmp_path):
    old = fake_python(tmp_path, "python3.9", (3, 9))
    done = make(root, f"{tmp_path}/env/bin/python", f"VENV={tmp_path}/env", f"PYTHON={old}", check=False)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr and "is 3.9" in done.stderr and "Way out" in done.stderr


def test_a_python_without_venv_is_told_what_it_lacks(root, tmp_path):
    bare = fake_python(tmp_path, "python3.12", (3, 12), venv=False)
    done = make(root, f"{tmp_path}/env/bin/python", f"VENV={tmp_path}/env", f"PYTHON={bare}", check=False)
    assert done.returncode != 0 and "python3-venv" in done.stderr


def test_a_newer_python_is_taken(root, tmp_path):
    newer = fake_python(tmp_path, "python3.12", (3, 12))
    done = make(root, f"{tmp_path}/env/bin/python", f"VENV={tmp_path}/env", f"PYTHON={newer}")
    assert f"Making {tmp_path}/env" in done.stdout


# ---- the wheel -----------------------------------------------------------------------------------------------------


def test_the_wheel_carries_the_package_and_its_licence_and_nothing_else(root, tmp_path, project):
    # A copy, as setuptools writes its build folders beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tpu_lab", "tpu_lab_launcher.py", "pyproject.toml", "LICENSE"):
        subprocess.run(["cp", "-r", str(root / name), str(source)], check=True)
    (source / "README.md").write_text("# TPU Lab\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--disable-pip-version-check",
        "-w",
        str(tmp_path),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("tpu_lab-*.whl")
    assert wheel.name == f"tpu_lab-{project['project']['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(p.relative_to(root)) for p in (root / "tpu_lab").rglob("*.py")}
    assert sources <= set(names)
    assert "tpu_lab_launcher.py" in names
    data = {str(path.relative_to(root)) for path in (root / "tpu_lab/data").rglob("*") if path.is_file()}
    assert data <= set(names) and "tpu_lab/data/precomputed/mingpt.json.gz" in data
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tpu_lab", "tpu_lab_launcher.py"}
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_the_licence_is_apache_2(root, project):
    text = (root / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert project["project"]["license"] == "Apache-2.0"


def test_the_changelog_knows_this_version(root, project):
    assert f"## {project['project']['version']}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
