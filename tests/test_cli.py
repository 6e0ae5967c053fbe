"""The command `tpu-lab`, through a real process, and the doctor's probes on machines built in a folder."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpu_lab import cli, doctor, doctor_probes
from tpu_lab.doctor_probes import Machine

VERSIONS = {"torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "marimo": "0.25.2"}
REQUIRES = {
    "tpu-lab": ["torch>=2.13,<2.14", "jax>=0.10.2,<0.11", "jaxlib>=0.10.2,<0.11", "marimo>=0.25.2,<0.26"],
    "jax": ["jaxlib<=0.10.2,>=0.10.1", "libtpu==0.0.42.*; extra == 'tpu'"],
}


def machine(root, environ=None, **versions):
    """A machine whose files are under `root` and whose packages are VERSIONS with changes (None: not installed)."""
    found = {**VERSIONS, **versions}
    return Machine(root, environ or {}, found.get, lambda name: REQUIRES.get(name, []))


def add_chip(root, generation="0x006f", file="dev/vfio/0"):
    """A TPU on the PCI bus and, unless file is "", the file to reach it by."""
    device = root / "sys/bus/pci/devices/0000:00:05.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1ae0\n")
    (device / "device").write_text(f"{generation}\n")
    if file:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def add_process(root, pid, name, *opened):
    """A process in /proc with these files open."""
    (root / f"proc/{pid}/fd").mkdir(parents=True)
    (root / f"proc/{pid}/comm").write_text(name + "\n")
    for number, path in enumerate(opened, 3):
        (root / f"proc/{pid}/fd/{number}").symlink_to(path)


def one(findings, name):
    """The only finding of that name."""
    (found,) = [f for f in findings if f.name == name]
    return found


def child(findings=(), returncode=0, stderr="", noise=""):
    """A stand-in for the child process, and the environments it was given."""
    seen = []

    def run(environ):
        seen.append(environ)
        out = noise + (doctor.MARK + json.dumps([f.__dict__ for f in findings]) + "\n" if findings else "")
        return SimpleNamespace(returncode=returncode, stdout=out, stderr=stderr)

    return run, seen


FINE = [doctor_probes.Finding("device", "ok", "works")]


def examine(machine, **options):
    run, _ = child(FINE)
    return doctor.examine(machine, run=options.pop("run", run), **options)


# ---- the doctor ----------------------------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_problem(tmp_path):
    findings = examine(machine(tmp_path))
    assert {f.status for f in findings} == {"ok"}
    assert one(findings, "platform").text.startswith("cpu")
    assert one(findings, "chip").text == "no TPU here"
    assert doctor.as_text(findings).endswith("All is well.")
    assert json.loads(doctor.as_json(findings))["ok"] is True


@pytest.mark.parametrize(
    "change, name, words",
    [
        ({"torch": None}, "torch", "not installed"),
        ({"torch": "2.14.1"}, "torch", "2.14.1 is outside"),
        ({"jaxlib": "0.10.0"}, "jaxlib pairing", "does not go with jax 0.10.2"),
        ({"libtpu": "0.0.40"}, "libtpu", "0.0.40 does not go with jax 0.10.2"),
        ({"torch_tpu": "0.2.0"}, "torch_tpu", 'takes the name "tpu"'),
    ],
)
def test_each_wrong_package_is_a_problem_with_a_way_out(tmp_path, change, name, words):
    found = one(examine(machine(tmp_path, **change)), name)
    assert found.status == "problem"
    assert words in found.text
    assert found.fix


def test_the_right_libtpu_and_a_silenced_torch_tpu_are_fine(tmp_path):
    quiet = machine(tmp_path, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, libtpu="0.0.42.1", torch_tpu="0.2.0")
    findings = examine(quiet)
    assert one(findings, "libtpu").status == "ok"
    assert one(findings, "torch_tpu").status == "ok"


def test_a_free_chip_is_named_and_chosen_but_not_taken(tmp_path):
    add_chip(tmp_path)
    run, seen = child(FINE)
    findings = examine(machine(tmp_path, libtpu="0.0.42"), run=run)
    assert "v6e" in one(findings, "chip").text and "/dev/vfio/0" in one(findings, "chip").text
    assert one(findings, "chip holder").text.startswith("nobody")
    assert one(findings, "platform").text.startswith("tpu")
    assert one(findings, "chip op").status == "note"
    assert seen[0]["TPU_LAB_PLATFORM"] == "cpu" and seen[0]["JAX_PLATFORMS"] == "cpu"


def test_the_chip_is_taken_when_asked_for(tmp_path):
    add_chip(tmp_path)
    run, seen = child(FINE)
    findings = examine(machine(tmp_path, libtpu="0.0.42"), run=run, use_chip=True)
    assert "TPU_LAB_PLATFORM" not in seen[0]
    assert not [f for f in findings if f.name == "chip op"]


def test_who_holds_the_chip_is_named(tmp_path):
    add_chip(tmp_path, "0x005e", "dev/accel0")
    add_process(tmp_path, 7, "bash", "/dev/null")
    add_process(tmp_path, 4242, "train.py", "/dev/null", "/dev/accel0")
    found = one(examine(machine(tmp_path, libtpu="0.0.42")), "chip holder")
    assert found.status == "problem"
    assert found.text == "process 4242 (train.py) has /dev/accel0 open"


def test_a_lock_left_behind_is_told_only_when_nobody_has_the_chip(tmp_path):
    add_chip(tmp_path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/libtpu_lockfile").touch()
    found = one(examine(machine(tmp_path, libtpu="0.0.42")), "chip lock")
    assert "rm /tmp/libtpu_lockfile" in found.fix
    add_process(tmp_path, 5, "train.py", "/dev/vfio/0")
    assert not [f for f in examine(machine(tmp_path, libtpu="0.0.42")) if f.name == "chip lock"]


def test_a_chip_without_its_device_file_is_a_problem(tmp_path):
    add_chip(tmp_path, file="")
    found = one(examine(machine(tmp_path)), "chip")
    assert found.status == "problem" and "--privileged" in found.fix


def test_vfio_without_a_tpu_on_the_bus_is_no_tpu(tmp_path):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/12").touch()
    findings = examine(machine(tmp_path))
    assert one(findings, "chip").text.startswith("no TPU here")
    assert one(findings, "platform").text.startswith("cpu")
    assert one(findings, "libtpu").status == "ok"


def test_the_npu_of_a_laptop_is_no_tpu(tmp_path):
    (tmp_path / "dev/accel").mkdir(parents=True)
    (tmp_path / "dev/accel/accel0").touch()
    assert one(examine(machine(tmp_path)), "chip").text == "no TPU here"


def test_an_unknown_platform_is_a_problem(tmp_path):
    found = one(examine(machine(tmp_path, {"TPU_LAB_PLATFORM": "gpu"})), "platform")
    assert found.status == "problem" and "use cpu or tpu" in found.fix


def test_a_chip_without_libtpu_is_a_problem(tmp_path):
    add_chip(tmp_path)
    found = one(examine(machine(tmp_path)), "libtpu")
    assert found.status == "problem" and 'pip install "jax[tpu]==0.10.2"' in found.fix


def test_asking_for_a_tpu_that_is_not_there_is_a_problem(tmp_path):
    found = one(examine(machine(tmp_path, {"TPU_LAB_PLATFORM": "tpu"})), "platform")
    assert found.status == "problem" and "TPU_LAB_PLATFORM" in found.fix


def test_a_failing_probe_is_a_finding_and_the_others_go_on(tmp_path):
    def broken(name):
        raise OSError("the disk is gone")

    findings = examine(Machine(tmp_path, {}, broken, lambda name: []))
    assert "OSError: the disk is gone" in one(findings, "packages").text
    assert one(findings, "platform").status == "ok"


@pytest.mark.parametrize(
    "returncode, stderr, words",
    [
        (1, "Traceback ...\nRuntimeError: torch_tpu owns 'tpu'", "RuntimeError: torch_tpu owns 'tpu'"),
        (-11, "", "killed by signal 11"),
    ],
)
def test_a_child_that_dies_is_a_finding(tmp_path, returncode, stderr, words):
    run, _ = child(returncode=returncode, stderr=stderr)
    found = one(examine(machine(tmp_path), run=run), "device")
    assert found.status == "problem" and words in found.text


def test_a_child_that_hangs_is_a_finding(tmp_path):
    def run(environ):
        raise subprocess.TimeoutExpired("python", 300)

    assert "did not end within 300 s" in one(examine(machine(tmp_path), run=run), "device").text


def test_what_libraries_print_in_the_child_does_no_harm(tmp_path):
    run, _ = child(FINE, noise="WARNING: something\n{not json\n")
    assert one(examine(machine(tmp_path), run=run), "device").text == "works"


def test_the_cache_folder_must_be_closed_to_others(tmp_path):
    folder = tmp_path / "programs"
    (finding,) = doctor.folder_finding(folder)
    assert finding.status == "ok" and "not made yet" in finding.text
    folder.mkdir(mode=0o700)
    (folder / "a").write_bytes(bytes(2**20))
    (finding,) = doctor.folder_finding(folder)
    assert finding.status == "ok" and "1 files, 1 MiB, mode 0700" in finding.text
    folder.chmod(0o777)
    (finding,) = doctor.folder_finding(folder)
    assert finding.status == "problem" and finding.fix == f"chmod 700 {folder}"
    (finding,) = doctor.folder_finding(None)
    assert finding.status == "note"


# ---- the command, as a process -------------------------------------------------------------------------------------


def tpu_lab(root, *arguments, **options):
    """Run the console script's module with a time limit; gives the finished process."""
    command = [sys.executable, str(root / "tpu_lab_launcher.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def test_version_is_that_of_the_project(root):
    done = tpu_lab(root, "version")
    assert done.returncode == 0
    assert re.fullmatch(r"tpu-lab \d+\.\d+\.\d+\n", done.stdout)


def test_light_commands_do_not_import_torch(root):
    code = (
        "import sys, tpu_lab_launcher; sys.argv = ['tpu-lab', 'version']; tpu_lab_launcher.main(); "
        "print([m for m in ('torch', 'jax', 'marimo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_doctor_of_this_machine_as_json(root):
    done = tpu_lab(root, "doctor", "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == doctor.SCHEMA
    problems = [f for f in told["findings"] if f["status"] == "problem"]
    assert (done.returncode == 1) == bool(problems) == (not told["ok"])
    assert not problems
    assert {"python", "torch", "jax", "platform", "device", "cache", "peak"} <= {f["name"] for f in told["findings"]}


def test_wrong_usage_is_told_with_exit_code_2(root):
    assert tpu_lab(root, "frobnicate").returncode == 2
    done = tpu_lab(root, "open", "--port", "70000")
    assert done.returncode == 2 and "70000 is no port" in done.stderr


def test_open_without_a_source_tree_says_where_the_notebooks_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages/tpu_lab/cli.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["open", "--tutorials"]) == 2
    told = capsys.readouterr().err
    assert "no folder tutorials/" in told and "Way out" in told


def test_open_says_which_path_is_missing(root, tmp_path):
    done = tpu_lab(root, "open", str(tmp_path / "none.py"))
    assert done.returncode == 2 and "none.py does not exist" in done.stderr


def test_open_says_that_a_port_is_taken(root, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tpu_lab(root, "open", "--headless", "--port", str(port), str(tmp_path))
    assert done.returncode == 1 and f"port {port}" in done.stderr and "Way out" in done.stderr


NOTEBOOK = """import marimo

app = marimo.App()


@app.cell
def _():
    1 + 1
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture(params=["gallery", "edit"])
def lab(root, tmp_path, request):
    """A running `tpu-lab open --headless` over a folder with one notebook: (port, process, what it printed)."""
    (tmp_path / "one.py").write_text(NOTEBOOK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(root / "tpu_lab_launcher.py"), "open", "--headless", "--port", str(port)]
    command += ["--edit"] if request.param == "edit" else []
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, str(tmp_path)], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while "access_token=" not in log.read_text() or not answers(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield SimpleNamespace(port=port, process=process, log=log)
    finally:
        process.kill()
        process.wait(timeout=20)


def answers(port, host="127.0.0.1"):
    """Whether something listens there."""
    with socket.socket() as s:
        s.settimeout(2)
        return s.connect_ex((host, port)) == 0


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments):
        return None


def status(url):
    """The HTTP status of a GET, redirections not followed."""
    try:
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect).open(url, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code


def listening(port):
    """The local addresses, as Linux writes them, on which the port is listened to."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table) as rows:
            for row in list(rows)[1:]:
                address, state = row.split()[1], row.split()[3]
                if state == "0A" and int(address.rsplit(":", 1)[1], 16) == port:
                    found.add(address.rsplit(":", 1)[0])
    return found


def test_open_serves_on_loopback_behind_a_token_and_stops_on_sigterm(lab):
    printed = lab.log.read_text()
    token = re.search(r"access_token=(\S+)", printed).group(1)
    assert f"ssh -N -L {lab.port}:127.0.0.1:{lab.port}" in printed
    here = f"http://127.0.0.1:{lab.port}"
    assert status(f"{here}/") in (303, 401)
    assert status(f"{here}/?access_token=wrong") in (303, 401)
    assert status(f"{here}/api/status/connections") in (303, 401, 403)
    if os.path.exists("/proc/self/cmdline"):  # every user of the machine can read it
        assert token not in Path(f"/proc/{lab.process.pid}/cmdline").read_text()
    browser = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor()
    )  # follows to the page, as a browser does
    assert b"<marimo" in browser.open(f"{here}/?access_token={token}", timeout=20).read()
    if os.path.exists("/proc/net/tcp"):
        assert listening(lab.port) == {"0100007F"}  # 127.0.0.1 and nothing else
    lab.process.send_signal(signal.SIGTERM)
    lab.process.wait(timeout=20)
    assert not answers(lab.port)
