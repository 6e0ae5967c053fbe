"""`tpu-lab doctor`: what is installed, which device is used, what is wrong and the way out of it.

The probes of doctor_probes.py come first. What needs the device (an op, the compile cache, the measured peak) runs in a
child process, so that a broken import, a crash or a hang is a finding, too, and not the end of the doctor. A TPU chip
is taken only when asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from tpu_lab import doctor_probes, errors
from tpu_lab.doctor_probes import Finding, Machine

SCHEMA = 1  # of the JSON
CHILD_SECONDS = 300  # the first import of torch and jax on a cold disk can take a minute
Run = Callable[[Mapping[str, str]], subprocess.CompletedProcess]
MARK = "tpu-lab doctor: "  # in front of the child's findings, as libraries print what they like


def examine(machine: Machine | None = None, use_chip: bool = False, run: Run | None = None) -> list[Finding]:
    """Run every probe. A probe that fails is a finding with its exception's text.

    use_chip: also run the op on the TPU chip, which takes the chip for a moment.
    run: what runs the child process, given its environment.
    """
    machine = machine or Machine()
    findings: list[Finding] = []
    for probe in doctor_probes.ALL:
        findings += guarded(probe.__name__, probe, machine)
    return findings + guarded("device", device, machine, use_chip, run or run_child)


def guarded(name: str, probe: Callable[..., list[Finding]], *arguments) -> list[Finding]:
    """The probe's findings, or one that says how the probe itself failed."""
    try:
        return probe(*arguments)
    except Exception as error:
        return [Finding(name, "problem", f"could not look: {errors.named(error)}", "report this as a bug")]


# ---- the device, in a child process --------------------------------------------------------------------------------


def run_child(
    environ: Mapping[str, str], code: str = "from tpu_lab.doctor import on_device; on_device()"
) -> subprocess.CompletedProcess:
    """Run `on_device`, or other code, in a new Python process. Raises subprocess.TimeoutExpired after CHILD_SECONDS."""
    source = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (source, environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-P", "-c", code]
    environment = {**environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS)


def device(machine: Machine, use_chip: bool, run: Run) -> list[Finding]:
    """Run `on_device` in a child and take its findings; how the child failed, if it did."""
    environ = dict(machine.environ)
    skipped = []
    if doctor_probes.chosen_platform(machine)[0] == "tpu" and not use_chip:
        environ.update(TPU_LAB_PLATFORM="cpu", JAX_PLATFORMS="cpu")
        skipped = [
            Finding("chip op", "note", "not tried, as it takes the chip for a moment", "`tpu-lab doctor --chip`")
        ]
    return from_child("device", run, environ) + skipped


def from_child(name: str, run: Run, environ: Mapping[str, str]) -> list[Finding]:
    """The findings that a child process printed behind MARK, or one that says how it failed."""
    try:
        done = run(environ)
    except subprocess.TimeoutExpired as error:
        text = f"`import tpu_lab` and a small op did not end within {error.timeout:.0f} s"
        return [Finding(name, "problem", text, "TPU_LAB_PLATFORM=cpu shows whether the chip is what hangs")]
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode == 0 and found:
        return [Finding(**f) for f in json.loads(found[-1])]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    fix = "`python -c 'import tpu_lab'` shows the whole message"
    return [Finding(name, "problem", f"the process that tried it failed ({how}): {last}", fix)]


def on_device() -> None:
    """In the child: import the package, run an op, and print the findings as one marked line of JSON."""
    findings: list[Finding] = []
    for name, probe in (("device", device_op), ("cache", compile_cache), ("peak", measured_peak)):
        findings += guarded(name, probe)
    print(MARK + json.dumps([asdict(f) for f in findings]))


def device_op() -> list[Finding]:
    """An 8x8 matmul on "tpu" against the CPU's own."""
    import torch

    import tpu_lab  # noqa: F401  (registers the device)

    a = torch.arange(64.0).reshape(8, 8) / 64
    got = (a.to("tpu") @ a.to("tpu")).cpu()
    name = torch.tpu.get_device_name()
    if not torch.allclose(got, a @ a, rtol=1e-2):  # a chip may round to bfloat16
        error = (got - a @ a).abs().max().item()
        return [Finding("device", "problem", f"{name}: an 8x8 matmul is off by {error:.3g}", "report this as a bug")]
    return [Finding("device", "ok", f"tpu:0 is {name}; an 8x8 matmul gives PyTorch's values")]


def compile_cache() -> list[Finding]:
    """The folder of the compile cache's disk tier: where, how big, and closed to other users."""
    from tpu_lab.backend import disk

    return folder_finding(disk.folder())


def folder_finding(folder: Path | None) -> list[Finding]:
    """One cache folder; None when the disk tier is off."""
    if folder is None:
        return [Finding("cache", "note", "the disk tier is off: each process compiles anew")]
    if not folder.exists():
        return [Finding("cache", "ok", f"{folder}, not made yet")]
    sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
    mode = folder.stat().st_mode & 0o777
    text = f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.3g} MiB, mode {mode:04o}"
    if mode & 0o022:
        return [Finding("cache", "problem", f"{text}: others may write programs that you run", f"chmod 700 {folder}")]
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return [Finding("cache", "problem", f"{text}: not yours to write", f"remove {folder} or give it to your user")]
    return [Finding("cache", "ok", text)]


def measured_peak() -> list[Finding]:
    """This machine's own matmul rate, what an MFU on the CPU is divided by."""
    from tpu_lab import chips

    peak = chips.peak("cpu")
    if peak is None:
        return [Finding("peak", "note", "not measured", "MFU needs `peak_flops=`")]
    return [Finding("peak", "ok", f"{peak.flops / 1e9:.3g} GFLOP/s, {peak.label} ({peak.source})")]


# ---- output --------------------------------------------------------------------------------------------------------

SIGNS = {"ok": "\u2713", "note": "!", "problem": "\u2717"}


def as_text(findings: list[Finding]) -> str:
    """One line a finding, the way out under it, and a closing line that counts."""
    width = max(len(f.name) for f in findings)
    lines = ["TPU Lab doctor", ""]
    for f in findings:
        lines.append(f"  {SIGNS[f.status] if f.name else ' '} {f.name:<{width}}  {f.text}")
        if f.fix:
            lines.append(f"    {'':<{width}}  way out: {f.fix}")
    problems = sum(f.status == "problem" for f in findings)
    closing = "1 problem" if problems == 1 else f"{problems} problems" if problems else "All is well"
    return "\n".join([*lines, "", closing + "."])


def as_json(findings: list[Finding]) -> str:
    """{"schema": 1, "ok": bool, "findings": [{"name", "status", "text", "fix"}, ...]}"""
    well = not any(f.status == "problem" for f in findings)
    return json.dumps({"schema": SCHEMA, "ok": well, "findings": [asdict(f) for f in findings]}, indent=1)
