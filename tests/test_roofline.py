"""The roofline: bounds by hand, measured against shared time, what stands on no axis."""

import re
from dataclasses import replace

import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import roofline as theory
from tpu_lab.chips import Peak
from tpu_lab.metrics import Metrics
from tpu_lab.trace import LaunchRecord, OpRecord, Trace
from tpu_lab.viz import roof_plot, roofline

PEAK = Peak(100e9, "f32", "this CPU\u2019s f32 matmul", "measured here", 10e9, "this CPU\u2019s memory", "measured here")
MS = 1_000_000


def op(index, name, kind, flops, nbytes, line, outputs=("f32[8]",)):
    return OpRecord(index, name, outputs, outputs, (), kind, "", "a.py", line, "x", "forward", None, index, flops, nbytes, 0, 0)  # fmt: skip


def launch(index, ops, device_ns, nbytes):
    return LaunchRecord(index, ops, "hit", "strict", "a.py", 1, "x", "strict", "k", 0, 0, 0, 0, device_ns, 0, nbytes, 1, 1, 0, 0, MS)  # fmt: skip


@pytest.fixture
def three():
    """A matmul of 1 GFLOP in 20 ms, a copy of 50 MB in 10 ms, and 1e6 additions over 12 MB in 2 ms; a launch each."""
    trace = Trace(start_ns=0, end_ns=40 * MS, meta={"mode": "strict"})
    trace.ops = [
        op(0, "aten.mm.default", "matmul", 10**9, 10**7, 1),
        op(1, "aten.clone.default", "movement", 0, 5 * 10**7, 2),
        op(2, "aten.add.Tensor", "elementwise", 0, 12 * 10**6, 3, ("f32[1000,1000]",)),
    ]
    trace.launches = [launch(0, (0,), 20 * MS, 10**7), launch(1, (1,), 10 * MS, 5 * 10**7), launch(2, (2,), 2 * MS, 12 * 10**6)]
    return trace


def test_bounds_by_hand(three):
    r = theory.Roofline(Metrics(three, PEAK))
    assert r.ridge == 10.0
    matmul, copy, add = r.points
    assert (matmul.intensity, matmul.bound, matmul.least_ns) == (100.0, "compute", 10 * MS)
    assert matmul.rate == pytest.approx(50e9) and matmul.reached == pytest.approx(0.5)
    assert (copy.work, copy.intensity, copy.bound, copy.reached) == (0, 0.0, "memory", pytest.approx(0.5))
    assert add.work == 10**6 and add.bound == "memory"  # one FLOP an element, though the record has no model FLOPs
    assert add.reached == pytest.approx(0.6)
    assert r.total.ns == 32 * MS and r.total.cost.bytes == 72 * 10**6 and r.total.measured


def test_what_only_moves_is_in_the_table_and_not_on_the_axis(three):
    view = roofline.draw(Metrics(three, PEAK))
    assert list(view.rows.cost) == ["mm", "clone", "add", "all launches"]
    copied = view.rows.set_index("cost").loc["clone"]
    assert copied.intensity == 0 and copied.bound == "memory" and copied.of_roof == pytest.approx(0.5)
    drawn = re.findall(r"<circle.*?<title>(\w+):", view.html)
    assert sorted(drawn) == ["add", "mm"] and 'class="badge m move">2<' in view.html
    assert view.title == "The matmuls run at 50% of this CPU\u2019s peak; 38% of the time waits for memory"
    assert "2 and 3 move bytes" in view.text() and "100\u00a0GFLOP/s: this CPU\u2019s f32 matmul, measured here".replace("\u00a0", " ") in view.text()


def test_a_long_file_name_is_cut_and_its_line_never(three):
    three.ops[:] = [replace(o, file="a_file_with_a_long_name.py", line=1000 + o.line) for o in three.ops]
    view = roofline.draw(Metrics(three, PEAK))
    assert view.text().count("ong_name.py:100") == 3
    assert "<span>a_file_with_a_long_name.py</span><span>:1001</span>" in view.html


def test_area_is_time_and_points_stand_where_the_axes_say(three):
    r = theory.Roofline(Metrics(three, PEAK))
    plot = roof_plot.plot(r, [("1", r.points[0]), ("3", r.points[2])])
    large, small = plot.marks
    assert (large.r / small.r) ** 2 == pytest.approx(20 / 2, rel=0.05)
    decade = {t.text: t.at for t in plot.xs}
    assert large.x == pytest.approx(decade["100"], abs=0.2)  # 100 FLOP/B
    rows = {t.text: t.at for t in plot.ys}
    assert rows["100"] < large.y < rows["10"]  # 50 GFLOP/s
    assert plot.ridge[0] == pytest.approx(decade["10"], abs=0.2) and plot.ridge[1] == pytest.approx(rows["100"], abs=0.2)


@pytest.mark.parametrize("bandwidth", [2e9, 5e9, 1e10, 4e10])
@pytest.mark.parametrize("of_ridge", [0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.5])
def test_no_label_lies_on_the_words_of_the_ridge(three, bandwidth, of_ridge):
    """Wherever the roofs of a machine meet, and however little of them a launch reaches."""
    r = theory.Roofline(Metrics(three, Peak(100e9, "f32", "a CPU", "measured", bandwidth)))
    work, rate = 1e6, r.peak / 5000
    cost = replace(r.points[0].cost, ns=1e9 * work / rate, bytes=int(work / (of_ridge * r.ridge)))
    low = replace(r.points[0], cost=cost, work=work, measured=True)
    plot = roof_plot.plot(r, [("all", low), *((str(i), p) for i, p in enumerate(r.points[1:]))])
    mark = next(m for m in plot.marks if m.label == "all")
    side = -1 if plot.ridge_end else 1
    words = sorted((plot.ridge[0] + side * 6, plot.ridge[0] + side * (6 + 5 * len(plot.ridge_words))))
    assert mark.lx + 9 < words[0] or mark.lx - 9 > words[1] or abs(mark.ly - (plot.box[3] - 10)) > 8, mark


def test_caches_can_beat_the_memory_roof_and_it_says_so(three):
    fast = Metrics(three, Peak(100e9, "f32", "this CPU\u2019s f32 matmul", "measured here", 1e9))
    text = roofline.draw(fast).text()
    assert "Over 100%" in text and "500 memory" in text


def test_without_a_roof_it_says_why(three):
    assert roofline.draw(Metrics(three, Peak(1e12, "", "given as peak_flops", "the caller"))).title == "No roof is known for this chip"
    assert "peak_flops=" in roofline.draw(Metrics(three, None)).text()
    for i, record in enumerate(three.launches):
        three.launches[i] = launch(i, record.ops, 0, record.bytes)
    empty = roofline.draw(Metrics(three, PEAK))
    assert empty.title.startswith("No device time was measured") and len(empty.rows) == 0 and "of_roof" in empty.rows
    with pytest.raises(ValueError, match="No device time"):
        theory.Roofline(Metrics(three, PEAK))
    with pytest.raises(ValueError, match="sorts by time, flops, bytes, not by 'wasted'"):
        roofline.draw(Metrics(traces.empty(), PEAK), sort="wasted")


def test_rows_add_up_and_sort():
    m = Metrics(traces.mingpt(4), PEAK)
    rows = roofline.draw(m).rows
    assert rows.device_ms[:-1].sum() == pytest.approx(rows.device_ms.iloc[-1])
    assert rows.device_ms.iloc[-1] == pytest.approx(sum(r.device_ns for r in m.launches_in(m.steady[0])) / 1e6, rel=0.05)
    by_bytes = roofline.draw(m, sort="bytes").rows
    assert by_bytes.bytes[:-1].is_monotonic_decreasing and set(by_bytes.cost) == set(rows.cost)
    assert roofline.draw(m, limit=3).html.count("<circle") == 4  # three costs and the launch


def step(x, w):
    y = torch.relu(x @ w)
    return (y * 2).sum().item()


def test_only_what_has_launches_of_its_own_is_measured():
    x, w = torch.ones(64, 64, device="tpu"), torch.ones(64, 64, device="tpu")
    seen = {}
    for mode in ("strict", "fused"):
        p = tpu_lab.profile(step, x, w, steps=2, warmup=1, mode=mode, peak_flops=1e12)
        assert p.metrics.peak.bandwidth > 0
        seen[mode] = p.roofline
    strict, fused = seen["strict"].rows, seen["fused"].rows
    assert strict.measured.all() and strict.of_roof.notna().all()
    assert list(fused.measured) == [False, False, True] and fused.of_roof.isna().tolist() == [True, True, False]
    assert "only the launch is measured" in seen["fused"].text().replace("\n", " ") and "hollow" in seen["fused"].html
    assert "hollow" not in re.sub(r"<style>.*?</style>", "", seen["strict"].html, flags=re.S)
    line = strict[strict.place.str.endswith(str(step.__code__.co_firstlineno + 1))].iloc[0]
    assert line.flops == 2 * 64**3 + 64 * 64 and line.bytes == 4 * 64 * 64 * (3 + 2)  # mm, then relu at an element each
