"""The views of made-up traces: true sums, golden texts, safe pages. No device is needed to read records."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fixtures import traces

from tpu_lab import advice
from tpu_lab.chips import Peak
from tpu_lab.metrics import Metrics
from tpu_lab.trace import LaunchRecord, OpRecord, Trace, WaitRecord
from tpu_lab.viz import cache, fusions, memory, number, ops, roofline, summary, theme, view

PEAK = Peak(182e9, "f32", "this CPU\u2019s f32 matmul", "a test", 21.4e9, "this CPU\u2019s memory", "a test")
FIXTURES = ("mingpt", "strict", "growing", "empty", "hostile")
VIEWS = {"summary": summary, "ops": ops, "fusions": fusions, "cache": cache, "roofline": roofline, "memory": memory}
GOLDEN = Path(__file__).parent / "fixtures" / "golden"
MS = 1_000_000


@pytest.fixture(scope="module")
def metrics():
    return {name: Metrics(getattr(traces, name)(), PEAK) for name in FIXTURES}


@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.parametrize("name", VIEWS)
def test_text_is_golden_and_fits_a_terminal(metrics, fixture, name):
    text = VIEWS[name].draw(metrics[fixture]).text()
    file = GOLDEN / f"{name}_{fixture}.txt"
    if os.environ.get("TPU_LAB_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == file.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100
    if name == "summary":
        assert len(text.splitlines()) <= 25


class _Page(HTMLParser):
    """Checks nesting, and keeps tags and text."""

    VOID = {"col", "br", "meta"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.parametrize("name", VIEWS)
def test_html_is_well_formed_safe_and_small(metrics, fixture, name):
    drawn = VIEWS[name].draw(metrics[fixture])
    html = drawn.html
    page = _Page()
    page.feed(html)
    assert page.stack == []
    tags = [tag for tag, _ in page.tags]
    assert not {"script", "img", "iframe", "link", "object"} & set(tags)
    assert not re.search(r"https?:|url\(|@import|javascript:", html)
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    assert page.tags[0] == ("div", {"class": "tl", "role": "figure", "aria-label": drawn.title})
    assert len(html.encode()) <= view.INLINE_BYTES
    assert tags.count("tr") <= view.INLINE_ROWS + 60  # rows, folds and heads
    for tag, attrs in page.tags:
        if tag == "svg" and "aria-hidden" not in attrs:
            assert attrs["role"] == "img" and attrs["aria-label"]
    assert tags.count("caption") == tags.count("table")
    assert VIEWS[name].draw(metrics[fixture]).html == html  # showing twice gives equal bytes


def test_user_text_stays_text(metrics):
    page = _Page()
    page.feed(summary.draw(metrics["hostile"]).html)
    assert traces.HOSTILE in "".join(page.words)
    assert "\x1b" not in theme.render([[("a\x1b[31mb\r\n", "b")]])


def test_titles_are_findings_without_full_stop(metrics):
    titles = {(f, n): VIEWS[n].draw(metrics[f]).title for f in FIXTURES for n in VIEWS}
    assert titles["mingpt", "summary"] == "458 ops run as 1 launch: 136\u00a0ms a step, 87% of it on the device"
    assert titles["strict", "summary"].endswith("72% of it in dispatch")
    assert (
        titles["growing", "cache"]
        == "26 compilations cost 19.4\u00a0s; 21 of them are one growing sequence in generate.py:18"
    )
    assert titles["empty", "ops"] == "No op ran on 'tpu'"
    for title in titles.values():
        assert len(title) <= 85 and not title.endswith(".")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_times_add_up(metrics, fixture):
    m = metrics[fixture]
    assert m.whole.total == pytest.approx(m.wall_ns, rel=1e-9)
    for step in m.steps:
        assert step.split.total == pytest.approx(step.ns, rel=1e-9)
        assert all(ns >= -1e-3 for _, ns in step.split.parts())
    rows = summary.draw(m).rows
    for part in ("time", "step"):
        own = rows[(rows.part == part) & (rows.unit == "ms")].set_index("name").value
        if len(own):
            assert own[["compile", "device", "transfer", "dispatch", "Python", "idle"]].sum() == pytest.approx(
                own.total
            )
    costs = rows[rows.part == "cost"]
    if len(costs):
        assert costs.share.sum() == pytest.approx(1)


def _launch(start, dispatch, device, ready, compile_ns=0, ops=(), cache="hit"):
    return LaunchRecord(0, ops, cache, "item", "a.py", 1, "x", "fused", "k", start, 0, compile_ns, dispatch, device, 0, 0, 1, 1, 0, 0, ready)  # fmt: skip


def test_each_moment_counts_once_and_the_device_wins():
    trace = Trace(start_ns=0, end_ns=100 * MS, meta={"cpu": [(0, 0), (100 * MS, 40 * MS)]})
    trace.launches = [_launch(10 * MS, 10 * MS, 30 * MS, 45 * MS)]  # device 15 to 45, dispatch 10 to 20
    trace.waits = [WaitRecord("item", "a.py", 2, "x", 40 * MS, 5 * MS, 3 * MS, 4)]  # 40 to 48
    split = Metrics(trace).whole
    assert split.device == 30 * MS
    assert split.dispatch == 5 * MS and split.hidden == 5 * MS
    assert split.transfer == 3 * MS
    # blocked 60 ms, of which 8 in the wait and 10 in the launch: at least 42 ms idle; the rest may be Python
    assert split.idle == pytest.approx(42 * MS) and split.python == pytest.approx(20 * MS)


def test_sleep_is_idle_and_unknown_when_nobody_sampled_the_cpu():
    trace = Trace(start_ns=0, end_ns=50 * MS, meta={"cpu": [(0, 0), (50 * MS, 1 * MS)]})
    assert Metrics(trace).whole.idle == pytest.approx(49 * MS)
    trace.meta = {}
    assert Metrics(trace).whole.python == pytest.approx(50 * MS)


def test_warmup_compile_and_first_steps_are_not_steady():
    m = Metrics(traces.mingpt(), PEAK)
    assert [s.number for s in m.steady] == list(range(3, 13))
    trace = traces.mingpt()
    trace.marks.append(("warmup end", trace.steps[5]))
    assert [s.number for s in Metrics(trace).steady] == list(range(7, 13))


def test_a_new_programs_first_run_belongs_to_no_steady_step():
    """An optimizer's hook flushes at the end of step 1; the program it made first runs in step 2's time."""
    trace = Trace(start_ns=0, end_ns=400 * MS)
    trace.launches = [
        _launch(80 * MS, 1 * MS, 60 * MS, 150 * MS, compile_ns=9 * MS, cache="miss"),
        _launch(190 * MS, 1 * MS, 9 * MS, 200 * MS),
        _launch(290 * MS, 1 * MS, 9 * MS, 300 * MS),
        _launch(390 * MS, 1 * MS, 9 * MS, 400 * MS),
    ]
    trace.steps = [100 * MS, 200 * MS, 300 * MS, 400 * MS]
    m = Metrics(trace)
    assert [s.settling for s in m.steps] == [False, True, False, False]
    assert [s.number for s in m.steady] == [3, 4] and m.step_split.device == 9 * MS


def test_mfu_is_flops_over_time_and_peak():
    m = Metrics(traces.mingpt(), PEAK)
    script = traces.step_ops()
    matmuls = sum(op.flops for op, _, _ in script if op.kind == "matmul")
    assert m.flops == matmuls
    mean = sum(s.ns for s in m.steady) / 10
    assert m.mfu == pytest.approx(matmuls / (mean * 1e-9 * 182e9))
    assert Metrics(traces.mingpt(), PEAK, flops=1e9).flops == 1e9
    assert Metrics(traces.mingpt(), None).mfu is None


def test_op_times_share_their_launch_and_views_are_free():
    m = Metrics(traces.mingpt(), PEAK)
    assert m.ops_time.sum() == pytest.approx(sum(r.device_ns for r in m.trace.launches))
    assert all(t == 0 for t, op in zip(m.ops_time, m.trace.ops) if op.kind == "view")


def test_ops_rows_are_complete():
    m = Metrics(traces.mingpt(2), PEAK)
    drawn = ops.draw(m)
    assert len(drawn.rows) == len(m.trace.ops) == len(drawn)
    assert list(drawn.rows.name[:3]) == ["embedding", "slice", "add"]
    backward = drawn.rows[drawn.rows.phase == "backward"].iloc[0]
    assert drawn.rows.name[backward.forward] == "nll_loss_forward"
    assert drawn.groupby("phase").size()["optimizer"] == 16  # the view answers for its DataFrame
    with pytest.raises(AttributeError, match="its columns are op, name"):
        drawn.nonsense


def test_ops_sorted_and_limited():
    m = Metrics(traces.mingpt(4), PEAK)
    text = ops.draw(m, limit=3, sort="flops").text()
    assert text.count("addmm") + text.count(" mm ") == 3 and "455 others" in text
    with pytest.raises(ValueError, match="sorts by time, bytes, flops"):
        ops.draw(m, sort="wasted")


def test_cache_rows_count_every_launch():
    m = Metrics(traces.growing(), PEAK)
    rows = cache.draw(m).rows
    assert rows.launches.sum() == len(m.trace.launches)
    assert (rows.hits.sum(), rows.misses.sum(), rows.disk.sum()) == (23, 26, 2)
    site = rows[rows.site == "train.py:43"].iloc[0]
    assert site.saved_s == pytest.approx(22 * 7.32 / 2, rel=1e-2)


def test_advice_finds_what_is_there_and_nothing_else(metrics):
    assert {f.kind for f in advice.findings(metrics["growing"])} == {"compiles", "last batch", "wait"}
    assert [f.kind for f in advice.findings(metrics["strict"])] == ["launch-bound", "wait"]
    assert [f.kind for f in advice.findings(metrics["mingpt"])] == ["wait"]
    clean = traces.mingpt()
    clean.waits.clear()
    assert advice.findings(Metrics(clean, PEAK)) == []
    fell = traces.mingpt(3)
    op = fell.ops[7]
    fell.ops[7] = OpRecord(**{**{f: getattr(op, f) for f in op.__slots__}, "fallback": True})
    found = advice.findings(Metrics(fell, PEAK))
    assert [f.kind for f in found] == ["fallback"] and "runs on the CPU" in found[0].act


def test_dropped_records_are_told():
    trace = traces.mingpt(3)
    trace.dropped = 7
    text = summary.draw(Metrics(trace, PEAK)).text()
    assert "7 dropped" in text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (6, "6.00"), (12, "12.0"), (0.41, "0.41"), (0.04, "0.04"), (0.004, "0.004"), (0.00001, "<0.001"), (99.96, "100"),
     (9360, "9,360"), (-3, "\u22123.00"), (None, "\u2013"), (float("nan"), "\u2013"), (1234567, "1,234,567")],
)  # fmt: skip
def test_three_significant_digits(value, text):
    assert number.sig(value) == text


def test_units():
    assert number.time(145e6) == "145\u00a0ms" and number.time(999.6e6) == "1.00\u00a0s"
    assert number.size(268 * 2**20) == "268\u00a0MiB" and number.rate(182e9) == "182\u00a0GFLOP/s"
    assert number.percent(0.563) == "56.3%" and number.plural(1, "launch", "launches") == "1 launch"


def test_colour_only_where_wanted(metrics, monkeypatch):
    drawn = summary.draw(metrics["mingpt"])
    assert "\x1b[" in drawn.text(colour=True) and "\x1b" not in drawn.text()
    assert re.sub(r"\x1b\[[\d;]*m", "", drawn.text(colour=True)) == drawn.text()
    drawn.text(ascii=True).encode("ascii")

    class Tty:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert theme.colours_wanted(Tty())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not theme.colours_wanted(Tty())
