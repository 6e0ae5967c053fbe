"""Files of a profile: JSON from which all of it comes back, a timeline that Perfetto can read, a page, tables."""

import gzip
import io
import json
from collections import defaultdict
from dataclasses import fields, replace

import pandas as pd
import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import export, perfetto
from tpu_lab.profile import VIEWS, Profile
from tpu_lab.trace import Trace


@pytest.fixture(scope="module")
def recorded():
    """Three small training steps in fused mode, with live bytes and programs."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to("tpu")
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(4, 8, device="tpu")

    def step():
        opt.zero_grad()
        loss = net(x).sum()
        loss.backward()
        opt.step()
        return loss.item()

    return tpu_lab.profile(step, steps=3, mode="fused", peak_flops=1e9, flops=5e6)


@pytest.fixture(scope="module")
def back(recorded, tmp_path_factory):
    file = tmp_path_factory.mktemp("json") / "p.json"
    recorded.to_json(file)
    return Profile.from_json(file)


def test_json_gives_back_every_record(recorded, back):
    for field in fields(Trace):
        ours, theirs = getattr(recorded.trace, field.name), getattr(back.trace, field.name)
        if field.name == "compiles":
            ours = [replace(r, hlo=None) for r in ours]
        if field.name == "programs":
            ours, theirs = list(ours), sorted(theirs, key=list(ours).index)
        if field.name == "meta":
            ours = json.loads(json.dumps(ours)) | {"peak": theirs["peak"], "flops": 5e6}
        assert theirs == ours, field.name
    assert recorded.trace.live and recorded.trace.programs


def test_json_gives_back_numbers_and_views(recorded, back):
    assert back.metrics.flops == 5e6 and back.metrics.peak == recorded.metrics.peak
    for name in VIEWS:
        assert str(back.view(name)) == str(recorded.view(name)), name
        assert back.view(name).html == recorded.view(name).html, name


def test_programs_keep_their_texts(recorded, back):
    key = recorded.trace.launches[-1].key
    ran, stored = recorded.trace.programs[key], back.trace.programs[key]
    assert stored.hlo() == ran.hlo() and "HloModule" in stored.hlo()
    assert stored.stablehlo() == ran.stablehlo() == stored.stablehlo("cpu")
    with pytest.raises(LookupError, match="record the profile again to lower it for tpu"):
        stored.stablehlo("tpu")


def test_texts_are_bounded_and_what_is_left_out_is_told(recorded, monkeypatch):
    monkeypatch.setattr(export, "TEXT_BYTES", 10)
    out = io.StringIO()
    recorded.to_json(out)
    document = json.loads(out.getvalue())
    assert document["programs"] == {} and document["meta"]["texts_left_out"] == len(recorded.trace.programs)
    monkeypatch.setattr(export, "TEXT_BYTES", 8 << 20)
    monkeypatch.setattr(export, "STABLEHLO", 0)
    out = io.StringIO()
    recorded.to_json(out)
    stored = next(iter(json.loads(out.getvalue())["programs"].values()))
    assert set(stored) == {"hlo"}
    with pytest.raises(LookupError, match="holds no stablehlo text of program k"):
        export.StoredProgram("k", {"hlo": b""}).stablehlo()


def test_a_text_that_cannot_be_made_loses_no_record():
    class Broken:
        def hlo(self):
            raise RuntimeError("gone")

        stablehlo = hlo

    trace = traces.mingpt(2)
    trace.programs["step0"] = Broken()
    out = io.StringIO()
    Profile(trace, peak_flops=1e9).to_json(out)
    document = json.loads(out.getvalue())
    assert document["meta"]["texts_left_out"] == 1 and len(document["trace"]["ops"]["rows"]) == len(trace.ops)


@pytest.mark.parametrize("name", ["mingpt", "strict", "growing", "empty", "hostile"])
def test_the_timeline_keeps_to_the_format(name, tmp_path):
    trace = getattr(traces, name)()
    if trace.ops:
        trace.live += [(op.index, (op.index + 1) << 18) for op in trace.ops[::3]]
    p = Profile(trace, peak_flops=1e11)
    p.to_perfetto(tmp_path / "t.json")
    p.to_perfetto(tmp_path / "t.json.gz")
    text = (tmp_path / "t.json").read_text(encoding="utf-8")
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode() == text
    events = json.loads(text)["traceEvents"]
    assert max(len(json.dumps(e, separators=(",", ":"), ensure_ascii=False).encode()) for e in events) <= 250
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
        assert {"ph", "pid", "tid", "name"} <= set(event)
    assert set(by_phase) <= {"M", "X", "C", "s", "f"}
    named = {(e["pid"], e["tid"]) for e in by_phase["M"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in by_phase["X"]} <= named
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in by_phase["X"])
    assert len([e for e in by_phase["X"] if (e["pid"], e["tid"]) == (perfetto.HOST, perfetto.OPS)]) == len(trace.ops)
    # a flow ends on the slice that begins there, and starts inside a launch on the host
    begins = {(e["ts"], e["name"].split(":")[0]) for e in by_phase["X"] if e["pid"] == perfetto.DEVICE}
    assert [e["id"] for e in by_phase["s"]] == [e["id"] for e in by_phase["f"]]
    assert all((e["ts"], f"launch {e['id']}") in begins for e in by_phase["f"])
    hosts = {
        e["name"].split(":")[0]: e
        for e in by_phase["X"]
        if e["tid"] == perfetto.LAUNCHES and e["name"].startswith("launch")
    }
    for e in by_phase["s"]:
        slice_ = hosts[f"launch {e['id']}"]
        assert slice_["ts"] <= e["ts"] <= slice_["ts"] + slice_["dur"] + 1e-3
    assert bool(by_phase["C"]) == bool(trace.ops)
    assert all(isinstance(v, float) for e in by_phase["C"] for v in e["args"].values())


def test_no_name_makes_an_event_long():
    trace = traces.mingpt(1)
    long = "\u4e16\U0001f600\n\x00" * 99
    trace.ops[:] = [replace(op, name=f"my.{long}", file=f"/a/{long}.py", module=long) for op in trace.ops[:3]]
    trace.compiles[:] = [replace(c, why=long) for c in trace.compiles]
    events = perfetto.events(trace, Profile(trace, peak_flops=1e9).metrics)
    assert max(len(json.dumps(e, separators=(",", ":"), ensure_ascii=False).encode()) for e in events) <= 250


def test_slices_of_a_track_nest(recorded, tmp_path):
    """Perfetto drops slices that overlap without one holding the other."""
    recorded.to_perfetto(tmp_path / "t.json")
    tracks = defaultdict(list)
    for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
        if e["ph"] == "X" and e["tid"] != perfetto.OPS:
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert (perfetto.DEVICE, 1) in tracks and (perfetto.HOST, perfetto.STEPS) in tracks
    for slices in tracks.values():
        for (_, b), (c, d) in zip(sorted(slices), sorted(slices)[1:]):
            assert c >= b - 2e-3 or d <= b + 2e-3


def test_page_holds_every_view_and_stays_small(tmp_path):
    trace = traces.mingpt()
    assert len(trace.ops) > 5000
    p = Profile(trace, peak_flops=1e11)
    p.to_html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 1_000_000 and "<script" not in page
    for name in VIEWS:
        assert p.view(name).body in page, name


@pytest.mark.parametrize("view", VIEWS)
def test_tables_of_every_view(recorded, tmp_path, view):
    recorded.to_csv(tmp_path / "p.csv", view)
    recorded.to_parquet(tmp_path / "p.parquet", view)
    rows = recorded.view(view).rows
    assert len(pd.read_csv(tmp_path / "p.csv")) == len(rows)
    read = pd.read_parquet(tmp_path / "p.parquet")
    assert list(read.columns) == list(rows.columns) and len(read) == len(rows)
    recorded.to_text(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text(encoding="utf-8") == f"{recorded}\n"
