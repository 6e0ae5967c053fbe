"""`tpu-lab doctor --workshop`, the wheelhouse and JupyterLab's command: on machines that are made up, without a download."""

import json
import re
import shlex
import sys
import tomllib
from types import SimpleNamespace

import pytest

from tpu_lab import cli, doctor, doctor_workshop, jupyter, wheelhouse
from tpu_lab.backend import disk
from tpu_lab.doctor_probes import Finding, Machine

GIB = 2**30


def lessons(root, numbers=range(1, 9)):
    for name in [f"tutorials/{n:02d}_x.py" for n in numbers] + ["notebooks/hello.py", "notebooks/jupyter/hello.ipynb"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize(
    "probe, given, status, words",
    [
        (doctor_workshop.cores, 8, "ok", "8"),
        (doctor_workshop.cores, 1, "note", "twice as long"),
        (doctor_workshop.memory, 16 * GIB, "ok", "16"),
        (doctor_workshop.memory, 3 * GIB, "note", "one notebook"),
        (doctor_workshop.memory, 1 * GIB, "problem", "too little"),
        (doctor_workshop.disk, 50 * GIB, "ok", "50 GiB free"),
        (doctor_workshop.disk, GIB // 2, "note", "0.5 GiB"),
        (doctor_workshop.disk, GIB // 10, "problem", "0.1 GiB"),
        (doctor_workshop.ports, lambda port: True, "ok", "2718 is free"),
        (doctor_workshop.ports, lambda port: port > 2719, "ok", "2720 is free (2718 is taken)"),
        (doctor_workshop.ports, lambda port: False, "problem", "none of 2718 to 2817"),
    ],
)
def test_each_probe_says_what_it_found_and_the_way_out(probe, given, status, words):
    (found,) = probe(given)
    assert found.status == status and words in found.text
    assert bool(found.fix) == (status != "ok")


def test_the_lessons_are_counted_and_what_lacks_is_named(tmp_path):
    tutorials, notebooks = doctor_workshop.lessons(lessons(tmp_path))
    assert tutorials.status == notebooks.status == "ok"
    assert tutorials.text.startswith("8 in") and notebooks.text.endswith("1 Jupyter twins")
    (tmp_path / "tutorials/05_x.py").unlink()
    assert "05 missing" in doctor_workshop.lessons(tmp_path)[0].text
    none = doctor_workshop.lessons(tmp_path / "elsewhere")
    assert [f.status for f in none] == ["problem", "problem"] and "source tree" in none[0].fix


def test_a_package_that_does_not_import_is_a_problem_with_its_error():
    found = doctor_workshop.imports({"json": "pip", "no_such_module": "no-such-package"})
    assert found[0].status == "ok" and found[0].text.startswith("pip ")
    assert found[1].status == "problem" and "No module named 'no_such_module'" in found[1].text
    assert "pip install no-such-package" in found[1].fix


def test_a_cache_folder_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(disk, "folder", lambda: tmp_path / "file" / "tpu_lab")
    (found,) = doctor_workshop.cache_folder()
    assert found.status == "problem" and "TPU_LAB_DISK_CACHE=0" in found.fix
    monkeypatch.setattr(disk, "folder", lambda: tmp_path / "new")
    (found,) = doctor_workshop.cache_folder()
    assert found.status == "ok" and str(tmp_path / "new") in found.text


def test_the_smoke_run_has_the_launches_of_each_mode():
    found = doctor_workshop.smoke()
    assert [f.name for f in found[:4]] == ["step, strict", "step, debug", "step, fused", "step, compile"]
    assert {f.status for f in found[:4]} == {"ok"}, found
    assert found[2].text.startswith("3 steps, 3 launches, ")


@pytest.mark.parametrize(
    "mode, ops, caches, words",
    [
        ("strict", [1, 2, 1], ["hit"] * 3, "each op"),
        ("fused", [9], ["miss"], "one launch"),
        ("fused", [9, 9, 9], ["miss", "miss", "miss"], "last step"),
        ("compile", [], [], "a few launches"),
    ],
)
def test_a_mode_that_does_not_keep_its_promise_is_told(mode, ops, caches, words):
    assert words in doctor_workshop.promise(mode, ops, caches)


def test_a_child_that_dies_is_a_finding():
    dead = SimpleNamespace(returncode=-11, stdout="", stderr="boom\n")
    found = doctor_workshop.examine(Machine(environ={}), run=lambda environ: dead)[-1]
    assert found.name == "smoke run" and "killed by signal 11: " not in found.text and "signal 11" in found.text


def test_the_command_adds_the_workshop_to_the_doctor(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda use_chip: [Finding("device", "ok", "works")])
    monkeypatch.setattr(doctor_workshop, "examine", lambda: [Finding("disk", "problem", "0 GiB free", "make room")])
    assert cli.main(["doctor", "--workshop"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"^  \u2713 device  works\n  \u2717 disk    0 GiB free\n            way out: make room$", out, re.M
    )
    assert cli.main(["doctor", "--workshop", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1]["name"] == "disk"


# ---- JupyterLab -----------------------------------------------------------------------------------------------------


def test_a_wheelhouse_where_no_folder_can_be_made_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["wheelhouse", str(tmp_path / "file" / "kit")]) == 2
    assert "cannot be made: Not a directory. Way out" in capsys.readouterr().err


def test_without_jupyterlab_one_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(jupyter, "is_installed", lambda: False)
    assert cli.main(["open", "--jupyter"]) == 1
    assert "tpu-lab[jupyter]" in capsys.readouterr().err


@pytest.mark.parametrize("flags, folder", [([], "notebooks"), (["--tutorials"], "tutorials")])
def test_jupyterlab_serves_the_twins_on_this_machine_only_behind_a_token(monkeypatch, capsys, flags, folder):
    started = []
    monkeypatch.setattr(jupyter, "is_installed", lambda: True)
    monkeypatch.setattr(jupyter.os, "execve", lambda *call: started.append(call))
    cli.main(["open", "--jupyter", "--headless", *flags])
    ((program, command, environment),) = started
    assert program == sys.executable and command[1:3] == ["-m", "jupyterlab"]
    assert "--ServerApp.ip=127.0.0.1" in command and "--ServerApp.open_browser=False" in command
    assert any(re.match(rf"--ServerApp.root_dir=.*/{folder}/jupyter$", part) for part in command)
    token = environment["JUPYTER_TOKEN"]
    assert len(token) >= 24 and token not in " ".join(command), "others can read a command line"
    assert f"?token={token}" in capsys.readouterr().out


def test_jupyterlab_opens_one_notebook_in_its_folder(tmp_path):
    notebook = tmp_path / "a b.ipynb"
    notebook.touch()
    assert jupyter.page(notebook) == "/lab/tree/a%20b.ipynb"
    assert f"--ServerApp.root_dir={tmp_path}" in jupyter.command(notebook, 2718, True)


# ---- the wheelhouse -------------------------------------------------------------------------------------------------


def test_the_wheelhouse_is_one_command_of_pip_with_the_exact_pins(capsys, tmp_path):
    index = "https://download.pytorch.org/whl/cpu"
    assert cli.main(["wheelhouse", str(tmp_path / "w"), "--extra", "jupyter", "--torch-index", index, "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:4] == [sys.executable, "-m", "pip", "wheel"] and words[-1] == f"{wheelhouse.SOURCE}[jupyter]"
    assert words[words.index("--constraint") + 1] == str(wheelhouse.SOURCE / "constraints.txt")
    assert words[words.index("--extra-index-url") + 1] == index
    assert words[words.index("--wheel-dir") + 1] == str(tmp_path / "w" / "wheels")
    assert not (tmp_path / "w").exists(), "nothing is written"


def test_what_learners_type_is_rehearsed_without_a_network(tmp_path):
    words = wheelhouse.rehearsal(tmp_path, ["jupyter", "jupyter"])
    assert "--no-index" in words and "--dry-run" in words and words[-1] == "tpu-lab[jupyter]"


def test_the_folder_holds_the_lessons_and_two_commands(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"x" * 2_500_000)
    wheelhouse.lay_out(tmp_path, [])
    text = (tmp_path / "README.txt").read_text()
    assert "1 files, 2.5 MB" in text and "-m venv tpu-lab" in text
    assert 'pip install --no-index --find-links wheels -c constraints.txt "tpu-lab"' in text
    assert len(list((tmp_path / "tutorials").glob("0*.py"))) == 8 and (tmp_path / "notebooks/hello.py").exists()
    settings = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["marimo"]
    assert settings["runtime"]["auto_instantiate"] is True, "a lesson runs when it is opened there, too"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_pip_that_fails_is_told(monkeypatch, capsys, tmp_path, failing):
    calls = []

    def run(command, **how):
        calls.append(command)
        return SimpleNamespace(returncode=int(len(calls) == failing + 1))

    monkeypatch.setattr(wheelhouse.subprocess, "run", run)
    assert cli.main(["wheelhouse", str(tmp_path)]) == 1 and len(calls) == failing + 1
    assert ("needs a network", "without a network")[failing] in capsys.readouterr().err


def test_without_the_source_tree_there_is_a_way_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(wheelhouse, "SOURCE", tmp_path)
    assert cli.main(["wheelhouse", str(tmp_path / "w")]) == 2
    assert "copy of the source tree" in capsys.readouterr().err
