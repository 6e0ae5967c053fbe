"""`tpu-lab profile`: an unchanged script runs as under `python`, and what ran on the device is reported after it."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback

import pytest

from tpu_lab import Profile, options, script

TRAIN = """\
import sys
import torch
from helper import STEPS

if __name__ == "__main__":
    print("args", sys.argv[1:], sys.argv[0].endswith("train.py"))
    x = torch.ones(8, 8, device="tpu")
    w = torch.ones(8, 8, device="tpu", requires_grad=True)
    opt = torch.optim.SGD([w], lr=0.1)
    for _ in range(STEPS):
        (x @ w).relu().sum().backward()
        opt.step()
    if "fail" in sys.argv:
        raise ValueError("no more data")
    if "exit" in sys.argv:
        sys.exit(7)
    if "wait" in sys.argv:
        print("ready", flush=True)
        __import__("time").sleep(60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("STEPS = 3\n")
    return folder


def tpu_lab(*words, cwd, **more):
    command = [sys.executable, "-m", "tpu_lab", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture(scope="module")
def failed(folder):
    files = {kind: folder / f"report.{kind}" for kind in ("json", "html", "csv", "trace")}
    late = [word for kind, file in files.items() for word in (f"--{kind}", file)]
    return tpu_lab("profile", "--mode", "fused", "train.py", "fail", *late, "--lr", "3", cwd=folder), files


def test_an_exception_goes_through_after_the_report(failed):
    done, _ = failed
    assert done.returncode == 1
    assert done.stdout == "args ['fail', '--lr', '3'] True\n"  # the script's own output is what it was
    report, _, trail = done.stderr.partition("Traceback")
    assert "3 steps" in report and "fused" in report and "stopped by ValueError: no more data" in report
    frames = [line for line in trail.splitlines() if line.startswith("  File")]
    assert len(frames) == 1 and "train.py" in frames[0] and trail.rstrip().endswith("ValueError: no more data")


def test_files_may_be_asked_for_after_the_script(failed):
    _, files = failed
    recorded = Profile.from_json(files["json"])
    assert len(recorded.metrics.steps) == 3
    assert {os.path.basename(op.file) for op in recorded.trace.ops if op.phase == "forward"} == {"train.py"}
    assert recorded.trace.meta["end_line"] == TRAIN.count("\n")
    assert "<html" in files["html"].read_text() and files["csv"].read_text().startswith("op,")
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_a_module_and_its_exit_code_and_what_follows_two_dashes(folder):
    done = tpu_lab("profile", "-q", "-m", "train", "exit", "--json", "--", "--json", "x", cwd=folder)
    assert done.returncode == 7 and done.stderr == ""
    said, document = done.stdout.splitlines()
    assert said == "args ['exit', '--json', 'x'] True"
    stored = json.loads(document)
    assert stored["schema"] == "tpu-lab-profile" and stored["meta"]["error"] == "SystemExit: 7"


@pytest.mark.skipif(os.name != "posix", reason="signals as a shell sends them")
def test_ctrl_c_ends_it_after_the_report(folder):
    command = [sys.executable, "-m", "tpu_lab", "profile", "train.py", "wait"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline().startswith("args") and child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, said
    assert "stopped by KeyboardInterrupt" in said and "3 steps" in said


def run(folder, monkeypatch, text, *args, name="other.py"):
    """A script in this process."""
    (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return script.run(name, list(args))


@pytest.mark.parametrize(
    "text, hint",
    [
        ("import torch\nd = 'cuda:0' if torch.cuda.is_available() else 'cpu'\ntorch.ones(3)", 'other.py:2 says `d = \'cuda:0\''),
        ("import torch\nx = torch.ones(3)\nif 0:\n    x = x.cuda()", "other.py:4 says `x = x.cuda()`. Write .to(\"tpu\") instead"),
        ("import torch\nx = torch.ones(3)", "other.py names no device"),
        ("import torch\nd = 'tpu'\nif torch.cuda.is_available():\n    d = 'cuda'", 'other.py:2 names "tpu", and no op came there'),
        ("import torch, io\nb = io.BytesIO()\ntorch.save(1, b)\nb.seek(0)\ntorch.load(b, map_location='cpu')", "names no device"),
    ],
)  # fmt: skip
def test_a_script_for_another_device_is_told_what_to_change(tmp_path, monkeypatch, text, hint):
    recorded, end = run(tmp_path, monkeypatch, text)
    assert end is None and not recorded.trace.ops
    said = str(recorded).replace("\n", " ")
    assert said.startswith("No op ran on 'tpu'") and hint in said


def test_a_script_with_a_profile_of_its_own_is_told_so(tmp_path, monkeypatch):
    recorded, end = run(tmp_path, monkeypatch, "import tpu_lab\nwith tpu_lab.profile() as p:\n    1 + 1")
    way = "`tpu-lab profile` records all of other.py, so run it with `python`, or take its own profile out"
    assert isinstance(end, RuntimeError) and way in str(end)
    assert "names no device" not in str(recorded) and way in str(recorded).replace("\n", " ")
    assert "whole" not in recorded.trace.meta


@pytest.mark.parametrize("text, kind", [("x = (1,\n", SyntaxError), ("import no_such_module_here", ImportError)])
def test_a_traceback_begins_in_the_script(tmp_path, monkeypatch, text, kind):
    _, end = run(tmp_path, monkeypatch, text)
    assert isinstance(end, kind)
    shown = "".join(traceback.format_exception(end))
    assert "other.py" in shown and "runpy" not in shown and "tpu_lab/script.py" not in shown


def test_files_are_written_where_the_command_was_given(tmp_path, monkeypatch, capsys):
    from tpu_lab import cli

    (tmp_path / "inner").mkdir()
    (tmp_path / "moves.py").write_text("import os, torch\nos.chdir('inner')\ntorch.ones(3, device='tpu') * 2\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", "-q", "--html", "report.html", "moves.py", "--json", "records.json"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"inner", "moves.py", "report.html", "records.json"}
    assert not list((tmp_path / "inner").iterdir())


def test_what_follows_a_module_is_the_modules(capfd):
    from tpu_lab import cli

    with pytest.raises(SystemExit) as end:
        cli.main(["profile", "-q", "-m", "json.tool", "--help"])
    assert end.value.code == 0 and "json.tool" in capfd.readouterr().out
    assert cli.main(["profile", "-m"]) == 2 and "say what to run" in capfd.readouterr().err


def test_the_process_is_as_before(tmp_path, monkeypatch):
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    _, end = run(
        tmp_path, monkeypatch, "import sys\nassert sys.argv == ['other.py', 'a'] and __name__ == '__main__'", "a"
    )
    assert end is None and (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["nothing.py"], "there is no script nothing.py"),
        ([], "say what to run"),
        (["--view", "ops,nope", "train.py"], "there is no view 'nope'"),
        (["--sort", "wasted", "--view", "ops", "train.py"], "add --view"),
        (["train.py", "--html"], "expected one argument"),
        (["--json", "nowhere/out.json", "train.py"], "there is no folder nowhere to write out.json into"),
    ],
)
def test_mistakes_are_one_sentence_and_run_nothing(folder, monkeypatch, capsys, words, sentence):
    from tpu_lab import cli

    monkeypatch.chdir(folder)
    assert cli.main(["profile", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out


def test_every_option_of_the_magic_that_a_script_can_have_is_there():
    from tpu_lab import cli

    parsed = vars(cli.parser().parse_args(["profile", "x.py"]))
    for flags, settings in (*options.SHOW, *options.FILES):
        assert settings.get("dest", flags[-1].lstrip("-")) in parsed
