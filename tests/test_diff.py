"""Profile.diff: what changed between two profiles, with noise told from change."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures import traces

import tpu_lab
from tpu_lab import difference
from tpu_lab.chips import Peak
from tpu_lab.difference import Spread, compare, differ, noise
from tpu_lab.metrics import Metrics
from tpu_lab.viz import diff, summary

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
PEAK = Peak(182e9, "f32", "this CPU’s f32 matmul", "a test")


def metrics(made, **options):
    return Metrics(made(**options), PEAK, 1e9)  # two sizes of model, taken for the same work


PAIRS = {
    "modes": lambda: (metrics(traces.strict, steps=6), metrics(traces.mingpt, steps=8, layers=3)),
    "same": lambda: (metrics(traces.mingpt, seed=0), metrics(traces.mingpt, seed=7)),
    "hostile": lambda: (metrics(traces.hostile), metrics(traces.hostile)),
    "half_empty": lambda: (metrics(traces.empty), metrics(traces.mingpt, steps=4)),
    "empty": lambda: (metrics(traces.empty), metrics(traces.empty)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_text_is_golden(name):
    text = diff.draw(*PAIRS[name]()).text()
    file = GOLDEN / f"diff_{name}.txt"
    if os.environ.get("TPU_LAB_GOLDEN") == "write":
        file.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == file.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", PAIRS)
def test_html_is_safe_and_the_same_twice(name):
    drawn = diff.draw(*PAIRS[name]())
    assert drawn.html == diff.draw(*PAIRS[name]()).html and len(drawn.html) < 300_000
    assert "<script" not in drawn.html and "<img" not in drawn.html and not re.search(r"https?:|url\(", drawn.html)
    assert len(drawn.title) <= 85 and not drawn.title.endswith(".")


def test_the_title_is_what_changed():
    d = compare(*PAIRS["modes"]())
    launches = d["launches"]
    assert d.title.startswith(f"Fused instead of strict: {launches.before:.0f} launches became 1, step ")
    assert launches.after == 1 and launches.changed and d["step"].changed
    back = compare(*reversed(PAIRS["modes"]()))
    assert back.title.startswith(f"Strict instead of fused: 1 launch became {launches.before:.0f}, step ")


def test_other_work_is_told_first():
    d = compare(Metrics(traces.strict(6), PEAK), Metrics(traces.mingpt(8), PEAK))
    assert d.title.startswith("Fused instead of strict: work 0.13 → 15.2\u00a0GFLOP, step ")


def test_more_bytes_and_nothing_else_are_told():
    before, after = traces.mingpt(), traces.mingpt()
    after.launches[:] = [replace(r, bytes=2 * r.bytes) for r in after.launches]
    d = compare(Metrics(before, PEAK, 1e9), Metrics(after, PEAK, 1e9))
    said = "Bytes in and out [0-9.]+ → [0-9.]+\u00a0.iB, time the same within noise, ± [0-9.]+%"
    assert re.fullmatch(said, d.title)
    after.launches[0] = replace(after.launches[0], cache="miss" if before.launches[0].cache == "hit" else "hit")
    d = compare(Metrics(before, PEAK, 1e9), Metrics(after, PEAK, 1e9))
    assert re.fullmatch(said, d.title), "misses are of the first steps, bytes of each"


def test_the_same_work_has_no_difference_above_noise():
    d = compare(*PAIRS["same"]())
    assert re.fullmatch("No difference above noise, ± [0-9.]+%", d.title)
    assert not any(q.changed for q in d.quantities) and not d.ops


def test_a_slower_step_is_found():
    before, after = traces.mingpt(), traces.mingpt()
    slow = Metrics(replace_device(after, 1.5), PEAK)
    d = compare(Metrics(before, PEAK), slow)
    assert re.fullmatch("The same programs, step 13[0-9] → (19|20)[0-9]\u00a0ms", d.title)
    assert d["device"].changed and d["MFU"].after < d["MFU"].before
    assert sum(c.ns[1] for c in d.lines) == pytest.approx(1.5 * sum(c.ns[0] for c in d.lines), rel=1e-3)


def test_the_sentence_and_the_report_say_one_time():
    """On a page of a notebook they stand one above the other."""
    before, after = PAIRS["modes"]()
    said = re.search(r"step (\S+) → (\S+)\u00a0ms", compare(before, after).title)
    for figure, m in zip(said.groups(), (before, after), strict=True):
        assert f"{figure}\u00a0ms a step" in summary.draw(m).title
    middle = compare(before, after, median=True)["step"]
    assert (middle.before, middle.after) == tuple(s.median for s in middle.spread)


def test_one_slow_step_is_no_change():
    before, after = (Spread.of([*range(100, 110), last]) for last in (109, 2000))
    assert after.mean > 2 * before.mean and not difference._moved(before, after)
    assert not difference._moved(Spread.of([1000, *range(90, 100)]), Spread.of(range(110, 120))), "the means go down"
    assert difference._moved(before, Spread.of(range(120, 130)))


def test_a_cold_cache_is_no_news():
    """The same programs as before, but new to this session."""
    before, after = traces.mingpt(), traces.mingpt()
    for trace, outcome in ((before, "hit"), (after, "miss")):
        trace.launches[:2] = [replace(r, cache=outcome) for r in trace.launches[:2]]
    d = compare(Metrics(before, PEAK, 1e9), Metrics(after, PEAK, 1e9))
    assert d["compile misses"].changed and not d["programs in all"].changed
    assert d.title.startswith("No difference above noise, ± ")
    after.launches[1] = replace(after.launches[1], key="one more")
    assert compare(Metrics(before, PEAK, 1e9), Metrics(after, PEAK, 1e9)).title.startswith("0 misses became 2, time")


def test_another_type_is_told_with_what_it_did():
    before, after = traces.mingpt(), traces.mingpt()
    after.ops[:] = [replace(o, inputs=tuple(one.replace("f32", "bf16") for one in o.inputs)) for o in after.ops]
    d = compare(Metrics(before, PEAK), Metrics(after, PEAK))
    assert re.fullmatch("Matmuls in bf16 instead of f32: time the same within noise, ± [0-9.]+%", d.title)


def test_times_all_over_are_not_called_the_same(monkeypatch):
    monkeypatch.setattr(difference, "SCATTERED", 1e-9)
    assert compare(*PAIRS["same"]()).title == "Times too scattered to compare"


def replace_device(trace, factor):
    """Each launch takes longer, and all that comes after it comes later."""
    shift, at = 0, []
    for i, r in enumerate(trace.launches):
        more = int(r.device_ns * (factor - 1))
        ready = r.ready_ns + shift + more
        trace.launches[i] = replace(r, time_ns=r.time_ns + shift, device_ns=r.device_ns + more, ready_ns=ready)
        at.append((r.ready_ns, more))
        shift += more

    def later(ns):
        return ns + sum(more for ready, more in at if ready <= ns)

    trace.ops[:] = [replace(o, time_ns=later(o.time_ns)) for o in trace.ops]
    trace.waits[:] = [replace(w, time_ns=later(w.time_ns), wait_ns=later(w.time_ns + w.wait_ns) - later(w.time_ns)) for w in trace.waits]
    trace.steps[:] = [later(ns) for ns in trace.steps]
    trace.marks[:] = [(what, later(ns)) for what, ns in trace.marks]
    trace.meta["cpu"] = [(later(ns), cpu) for ns, cpu in trace.meta["cpu"]]
    trace.end_ns = later(trace.end_ns)
    return trace


def test_an_op_that_only_one_has_is_named_with_its_line():
    before, after = traces.mingpt(4), traces.mingpt(4)
    op = next(o for o in after.ops if o.kind == "elementwise")
    after.ops[:] = [replace(o, name="aten.gelu.default") if (o.name, o.line) == (op.name, op.line) else o for o in after.ops]
    d = compare(Metrics(before, PEAK), Metrics(after, PEAK))
    assert {(o.side, o.line) for o in d.ops} == {("before", op.line), ("after", op.line)}
    assert [o.name for o in d.ops if o.side == "after"] == ["gelu"]
    rows = diff.draw(Metrics(before, PEAK), Metrics(after, PEAK)).rows
    assert set(rows.part) == {"quantity", "line", "op"} and rows[rows.part == "op"].changed.all()


def test_a_difference_needs_steps_and_space():
    a, b = Spread.of([100, 102, 104, 106, 108]), Spread.of([110, 112, 114])
    assert (a.median, a.half, a.n) == (104, 2, 5) and differ(a, b) and noise(a, b) == pytest.approx(3 / 104)
    assert not differ(a, Spread.of([105, 106, 107])) and not differ(Spread.of([1]), Spread.of([9]))
    assert noise(Spread.of([1, 2]), a) is None and Spread.of([5, 1]).median == 1
    once = compare(metrics(traces.mingpt, steps=1), metrics(traces.mingpt, steps=1))
    assert "too few steps to tell a difference from noise" in once.title


def test_parts_add_up_to_the_step():
    m = PAIRS["modes"]()
    d = compare(*m)
    parts = [d[name] for name in ("compile", "device", "transfer", "dispatch", "Python", "idle")]
    assert sum(p.before for p in parts) == pytest.approx(d["step"].before)
    assert sum(p.after for p in parts) == pytest.approx(d["step"].after)


def test_profiles_diff_and_the_view_needs_two():
    before, after = (tpu_lab.Profile(made(steps=4), peak_flops=182e9) for made in (traces.strict, traces.mingpt))
    assert before.diff(after).title.startswith("Fused instead of strict: ")
    with pytest.raises(ValueError, match=r"compares two profiles: before.diff\(after\)"):
        before.view("diff")
    with pytest.raises(TypeError, match="not a profile and a dict"):
        before.diff({})
