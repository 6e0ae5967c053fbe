"""Beside `notebooks/modes.py`: what changed between two comparisons, what each mode costs, and programs against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_lab.difference import compare
from tpu_lab.modes import Comparison
from tpu_lab.profile import Profile
from tpu_lab.viz import number, page


def changed(before: Comparison, after: Comparison) -> str | None:
    """What changed from one comparison to the next, told by the most fused mode that both have; None without such."""
    common = [
        mode for mode in ("fused", "compiled", "strict", "debug") if {mode} <= {*before.profiles} & {*after.profiles}
    ]
    if not common:
        return None
    two = (seen.profiles[common[0]].metrics for seen in (before, after))
    return f"What changed, {common[0]}: {compare(*two, median=True).title}"  # the picture below it shows medians


def costs(seen: Comparison) -> list[dict[str, Any]]:
    """A row a mode: its launches a step, what the program cache said of all its launches, and what that took."""
    rows = []
    for mode, profile in seen.profiles.items():
        m, row = profile.metrics, seen.rows.set_index("mode").loc[mode]
        said = [launch.cache for launch in profile.trace.launches]
        rows.append(
            {
                "mode": mode,
                "launches a step": int(row.launches),
                "misses": said.count("miss"),
                "disk hits": said.count("disk"),
                "hits": said.count("hit"),
                "compiling": float(row.compile_s),
                "first step": m.steps[0].ns / 1e9,
                "a step after it": float(row.step_ms) / 1e3,
            }
        )
    return rows


def on_chip(profiles: Mapping[str, Profile], chip: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fused and the compiled step as the TPU's compiler makes them: ({mode: what it gives}, a row of figures each)."""
    made = {mode: profiles[mode].on(chip) for mode in ("fused", "compiled") if mode in profiles}
    rows = []
    for mode, compiled in made.items():
        moved = sum(part.times * sum(part.placed.traffic) for part in compiled.parts if part.placed)
        programs = sum(part.times for part in compiled.parts)
        rows.append(
            {"mode": mode, "programs": programs, "moved": moved, "vmem": compiled.vmem, "bound": compiled.bound_ns}
        )
    return made, rows


def costs_table(seen: Comparison) -> page.Piece:
    """`costs` as a table, times with their units."""
    times = ("compiling", "first step", "a step after it")
    return page.table(
        [row | {name: number.time(1e9 * row[name]) if row[name] else "0" for name in times} for row in costs(seen)],
        caption="Launches, misses and time of each mode",
    )


def sizes(chosen: Mapping[str, Any]) -> str:
    """`d128 L3 B64`: the settings of a step."""
    return f"d{chosen['width']} L{chosen['layers']} B{chosen['batch']}"


def chip_table(rows: Sequence[Mapping[str, Any]], chip: str, of: str) -> page.Piece:
    """The rows of `on_chip` as a table. of: the settings they are for."""
    return page.table(
        [
            {
                f"mode, {of}": row["mode"],
                "programs of several ops": row["programs"],
                "MiB through HBM": number.sig(row["moved"] / 2**20),
                "MiB of VMEM, at most": number.sig(row["vmem"] / 2**20),
                "no step is faster than": f"≥ {number.time(row['bound'])}",
            }
            for row in rows
        ],
        caption=f"The fused and the compiled step on {chip}, for {of}",
    )
