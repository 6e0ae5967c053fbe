"""Ticks and hints: what a check says of right, wrong, blank, broken and hostile answers, and how it shows itself."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safe_page import check_page

import tpu_lab
from tpu_lab import check
from tpu_lab.score import CodeLine, Outcome, Score, Tally
from tpu_lab.viz import check as drawn

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
MIB = 2**20
SHEET = check.Sheet("03", "One launch a step")


def made():
    """The four states of the design: a prediction, better than par, a line that disagrees, not tried."""
    better = [("launches", 1, 1), ("misses", 2, 2), ("bytes", 255 * MIB, 268 * MIB), ("MFU", 0.563, 0.55)]
    worse = [
        ("launches", 2, 1),
        ("misses", 4, 2),
        ("bytes", 331 * MIB, 268 * MIB),
        ("MFU", 0.498, 0.55),
        ("time", None, 1e6),
    ]
    return (
        Outcome("3.1", "predict", "pass", "Right.", "Strict launches each.", (CodeLine("n = ", "743"),)),
        Outcome(
            "3.2", "fuse the step", "pass", "One launch a step.", "Better.", scores=tuple(Score(*s) for s in better)
        ),
        Outcome(
            "3.3",
            "no flush",
            "fail",
            "Not yet: 2 launches, par is 1.",
            "`print` in line 2 flushed the graph.",
            (CodeLine("loss.backward()"), CodeLine("    print(loss)", marked=True), CodeLine("", "opt.step()")),
            ("what if it is read after `opt.step()`?", "later", "last"),
            tuple(Score(*s) for s in worse),
            "p.ops.loc[613]",
        ),
        Outcome(
            "3.4",
            "pad",
            "open",
            "",
            "Not tried: `pad` returns `None`.",
            (CodeLine("def pad(x):"), CodeLine("    ", "...")),
        ),
    )


def hostile():
    bad = "</div><script>alert(1)</script>\x1b[2J\u202e`"
    return (Outcome(bad, bad, "fail", bad, bad, (CodeLine(bad, bad, True),), (bad, bad), (Score("ops", 3, 1),), bad),)


@pytest.mark.parametrize("name", ["made", "hostile", "empty"])
def test_text_is_golden_and_the_page_is_safe(name):
    view = drawn.draw_all(Tally("03", "One launch a step", {"made": made, "hostile": hostile, "empty": tuple}[name]()))
    file = GOLDEN / f"check_{name}.txt"
    if os.environ.get("TPU_LAB_GOLDEN") == "write":
        file.write_text(view.text() + "\n", encoding="utf-8")
    assert view.text() + "\n" == file.read_text(encoding="utf-8")
    check_page(view)
    for outcome in view.outcomes:
        check_page(drawn.draw(outcome))


def test_the_title_counts_ticks_and_rows_hold_the_scores():
    view = drawn.draw_all(Tally("03", "One launch a step", made()))
    assert view.title == "One launch a step: 2 of 4 checks tick" and view.state == "fail" and not view.passed
    assert view.rows.groupby("check").size().to_dict() == {"3.1": 1, "3.2": 4, "3.3": 5, "3.4": 1}
    assert view.hint(2) == "later" and view.hint(9) == "last"
    assert drawn.draw_all(Tally("1", "All", made()[:2])).title == "All: all 2 checks tick"
    with pytest.raises(TypeError, match="passed"):
        bool(view)


@pytest.mark.parametrize(
    ("score", "word", "reached"),
    [
        (Score("launches", 1, 1), "par", True),
        (Score("misses", 4, 2), "2 too many", False),
        (Score("launches", 1, 8), "7 fewer", True),
        (Score("bytes", 255, 268), "5% fewer", True),
        (Score("bytes", 331, 268), "24% over", False),
        (Score("bytes", 900, 268), "3.4\u00d7 par", False),
        (Score("bytes", 268.4, 268), "par", True),
        (Score("MFU", 0.563, 0.55), "1.3 points over", True),
        (Score("MFU", 0.498, 0.55), "5.2 points under", False),
        (Score("time", 2e6, 1.6e6), "25% slower", False),
        (Score("MFU", None, 0.5), "not measured", False),
        (Score("misses", 0, 0), "par", True),
        (Score("misses", 3, 0), "3 too many", False),
    ],
)
def test_the_word_says_which_way(score, word, reached):
    assert (score.word, score.reached) == (word, reached)
    yours, par = score.bar()
    assert 0 <= yours <= 1 and 0 <= par <= 1


@pytest.mark.parametrize(
    ("given", "actual", "state"),
    [
        (..., 3, "open"),
        (None, 3, "open"),
        (3, 3, "pass"),
        (3.0, 3, "pass"),
        (4, 3, "fail"),
        ("3", 3, "fail"),
        (True, 1, "fail"),
        (float("nan"), 3, "fail"),
        ((1, 2), (1, 2), "pass"),
        ([1, 2], (1, 2), "pass"),
        ((1, ...), (1, 2), "fail"),
        (7, (1, 2), "fail"),
        ("F32[4]", "f32[4]", "pass"),
        (object(), 3, "fail"),
        (False, False, "pass"),
        (torch.zeros(3), 3, "fail"),
    ],
)
def test_predictions(given, actual, state):
    view = SHEET.predict("3.1", given, actual, name="n", right="So.", hints=["look"])
    assert view.state == state
    assert (view.outcomes[0].hints != ()) == (state == "fail")
    assert "pass" == state or str(actual) not in view.outcomes[0].rest + view.outcomes[0].lead, "it gives nothing away"


@pytest.mark.parametrize(
    ("given", "actual", "said"),
    [
        (1, True, "`1` is neither `True` nor `False`, and one of them is asked for."),
        ((1, 1, 0, 0), (True, True, False, False), "value 1: `1` is neither `True` nor `False`, and one of them is asked for."),
        ((False, np.False_), (True, False), "value 2: `np.False_` is neither `True` nor `False`, and one of them is asked for."),
        ((False, ...), (True, False), "value 1 disagrees."),
        (True, 1, "that is `True`, and a number is asked for."),
    ],
)
def test_a_value_of_another_kind_is_told_so(given, actual, said):
    assert SHEET.predict("1", given, actual).outcomes[0].lead == f"Not yet: {said}"


def test_a_prediction_may_be_near():
    assert SHEET.predict("1", 0.52, 0.5, within=0.05).passed and not SHEET.predict("1", 0.54, 0.5, within=0.05).passed


def chain(x):
    y = x * 2
    return (y + 1).sum()  # yours


def wrong(x):
    y = x * 2
    return y @ torch.ones(7, device="tpu")


def blank(x):
    y = x[..., 0]
    y = ...
    return y


def sliced(x):
    return x[..., 0]


@pytest.fixture(scope="module")
def x():
    return torch.ones(4, 4, device="tpu")


def test_an_attempt_is_scored(x):
    tried = check.attempt(chain, x, mode="fused", fresh=True)
    view = SHEET.do("1", tried, par={"launches": 1, "misses": 2, "bytes": 68}, right="One launch.", why="All at once.")
    assert view.passed and view.outcomes[0].lead == "One launch."
    assert view.outcomes[0].rest == "Better than par in misses. All at once."
    assert [s.yours for s in view.outcomes[0].scores] == [1, 1, 68]
    assert view.outcomes[0].code[-1] == CodeLine("    ", "return (y + 1).sum()")
    over = SHEET.do("1", check.attempt(chain, x, mode="strict"), par={"launches": 1}, hints=["fuse it"])
    assert over.state == "fail" and over.outcomes[0].lead == "Not yet: 3 launches, par is 1."
    assert "Not yet" in repr(over) and "fuse it" in over._repr_html_() and over._mime_()[0] == "text/html"


def test_what_a_learner_raises_is_a_hint_with_its_line(x):
    view = SHEET.do("1", check.attempt(wrong, x), hints=["shapes"])
    assert view.state == "fail" and "stopped in line 3: RuntimeError: size mismatch" in view.outcomes[0].rest
    assert [line.marked for line in view.outcomes[0].code] == [False, False, True]
    assert tpu_lab.trace.active is None, "the recording has ended"
    leaving = SHEET.do("1", check.attempt(lambda: exit(3)), hints=["stay"])
    assert "SystemExit" in leaving.outcomes[0].rest


@pytest.mark.parametrize("fn", [..., None, blank, lambda *_: None])
def test_a_blank_is_not_tried_and_not_run(x, fn):
    tried = check.attempt(fn, x)
    view = SHEET.do("1", tried, par={"launches": 1}, todo="Two lines.", hints=["no"])
    assert view.state == "open" and view.outcomes[0].rest.startswith("Not tried:") and not view.outcomes[0].hints
    assert view.hint(1).startswith("There is no hint")


def test_an_ellipsis_in_an_index_is_no_blank(x):
    assert check.attempt(sliced, x).tried and not check.attempt(blank, x).tried
    assert "line 3" in check.attempt(blank, x).error


def test_no_function_is_told_so():
    assert "should be a function, not an int" in check.attempt(3, name="step").error


def test_what_an_answer_sets_for_the_process_ends_with_it(x):
    def settles(fails):
        torch.set_default_device("tpu")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
        return 1 / 0 if fails else x

    before = torch.tpu.eager_mode
    for fails in (True, False):
        assert bool(check.attempt(settles, fails).error) == fails
        assert torch.ones(1).device.type == "cpu" and torch.ones(1).dtype == torch.float32
        assert torch.is_grad_enabled() and torch.tpu.eager_mode == before


def test_a_wrong_index_that_nothing_waited_for_is_the_attempts_own():
    def reads(fails):
        x = torch.ones(3, device="tpu")[torch.tensor([7]).to("tpu")]
        return 1 / 0 if fails else x

    for mode in ("strict", "fused"):
        assert "index 7 is out of bounds" in check.attempt(reads, False, mode=mode).error
        assert "ZeroDivisionError" in check.attempt(reads, True, mode=mode).error
        torch.tpu.synchronize()  # nothing is left for the next cell


def test_what_runs_none_of_its_lines_is_told_so():
    def gives(x):
        yield x * 2

    async def waits(x):
        return x * 2

    for fn, words in ((gives, "`gives` has a `yield`"), (waits, "`waits` is `async`")):
        view = SHEET.do("1", check.attempt(fn, 1), hints=["return it"])
        assert view.state == "fail" and words in view.outcomes[0].rest and view.hint(1) == "return it"


def test_a_test_names_the_record_that_disagrees(x):
    tried = check.attempt(chain, x, mode="strict")
    found = check.Disagree("the first op.", at=tried.profile.trace.ops[1], record="p.ops.rows.loc[1]")
    view = SHEET.do("1", tried, test=lambda a: found, hints=["a", "b"])
    assert [line.marked for line in view.outcomes[0].code] == [False, False, True]
    assert "the record: p.ops.rows.loc[1]" in view.text()
    unreadable = SHEET.do("1", 5, test=lambda value: value.shape, hints=["a tensor"])
    assert "cannot use this result (AttributeError" in unreadable.outcomes[0].rest
    with pytest.raises(ValueError, match="no score 'speed'"):
        SHEET.do("1", tried, par={"speed": 1})


def elsewhere(x):
    return (x.cpu() * 2).to("tpu")


def typed_in(x):
    return torch.full((4, 4), 2.0, device="tpu")


def in_vain(x):
    x @ x  # nobody holds the result
    return torch.zeros_like(x)


def test_work_on_the_cpu_is_never_better_than_par(x):
    for fn, par, ran, said in (
        (elsewhere, {"launches": 1}, None, "nothing ran on `tpu`: this ran on the CPU, or its result was typed in."),
        (elsewhere, {"bytes": 99}, (), "nothing was computed on `tpu`: this ran on the CPU, or its result was typed in."),
        (elsewhere, None, (), "nothing was computed on `tpu`"),
        (typed_in, {"launches": 1, "bytes": 999}, (), "nothing was computed on `tpu`"),
        (in_vain, {"launches": 1}, (), "nothing was computed on `tpu`"),
        (chain, {"launches": 1}, ("reduce", "backward"), "the record of `tpu` holds no backward op: that part ran on"),
    ):
        view = SHEET.do("1", check.attempt(fn, x, mode="fused"), par=par, ran=ran, hints=["go there"])
        assert view.state == "fail" and view.outcomes[0].rest.startswith(said), f"{fn.__name__}\n{view}"
        assert "etter than par" not in view.text() and view.hint(1) == "go there"
    views = check.attempt(lambda x: x.t(), x)
    assert SHEET.do("1", views, par={"launches": 0}).passed, "par may be to launch nothing"
    assert SHEET.do("1", check.attempt(typed_in, x, mode="fused"), par={"launches": 1}).passed, "nothing is to be computed"
    assert SHEET.do("1", check.attempt(chain, x), ran=("elementwise", "forward reduce")).passed
    with pytest.raises(ValueError, match="no part 'forwards'"):
        SHEET.do("1", views, ran=("forwards matmul",))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_step_of_a_training_has_to_run_there(compiled):
    def train(steps_there):
        w = torch.ones(4, 4, device="tpu", requires_grad=True)
        product = torch.compile(torch.matmul, backend="tpu") if compiled else torch.matmul
        opt = torch.optim.AdamW([w], 0.1)
        for step in range(3):
            if step < steps_there:
                product(w, w).sum().backward()
            else:
                w.grad = torch.zeros(4, 4).to("tpu")
            opt.step()
            opt.zero_grad()
        return w

    whole, partly = (check.attempt(train, n, mode="fused") for n in (3, 2))
    assert SHEET.do("1", whole, ran=check.TRAINING).passed
    said = SHEET.do("1", partly, ran=check.TRAINING).outcomes[0].rest
    assert said == "the record of `tpu` holds no forward matmul op in step 3: that part ran on the CPU, or not at all."


def test_steps_are_the_optimizers():
    w = torch.ones(4, device="tpu", requires_grad=True)
    opt = torch.optim.SGD([w], 0.1)

    def train():
        for _ in range(4):
            (w * w).sum().backward()
            opt.step()
            opt.zero_grad()
        return w

    p = check.attempt(train, mode="fused", fresh=True).profile
    assert len(p.trace.launches) == 4 and check.measure(p, "launches") == 1
    assert check.measure(p, "ops") * 4 == pytest.approx(len(p.trace.ops), abs=4)
    assert check.measure(5, "launches") is None


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_a_lowering_on_trial_leaves_nothing(x):
    def run():
        return torch.special.spherical_bessel_j0(x)

    def ran():
        (op,) = check.attempt(run).profile.trace.ops
        return op.fallback

    assert ran()
    with check.lowered(torch.ops.aten.special_spherical_bessel_j0, lambda v: v * 0 + 7, promote="float"):
        assert not ran() and run().cpu().unique().tolist() == [7]
    with pytest.raises(ZeroDivisionError), check.lowered(torch.ops.aten.special_spherical_bessel_j0, jnp.sin):
        raise ZeroDivisionError
    assert ran() and run().cpu()[0, 0].item() == pytest.approx(0.8414710)
