"""An exception is written as text in one place, and no exception of a stranger can break who writes it."""

import pytest

import tpu_lab
from tpu_lab import check, errors


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Deaf(Exception):
    def __str__(self):
        return 5


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ValueError("no  such\nname"), "ValueError: no  such\nname"),
        (ValueError(), "ValueError"),
        (Speechless(), "Speechless: (its text cannot be had: __str__ raised RuntimeError)"),
        (Deaf(), "Deaf: (its text cannot be had: __str__ raised TypeError)"),
    ],
)
def test_what_an_exception_says(error, named):
    assert errors.named(error) == named
    assert errors.line(ValueError("no  such\nname"), 7) == "no such"


def stops(*args):
    raise Speechless


def test_a_profile_ends_whatever_ended_its_block():
    with pytest.raises(Speechless), tpu_lab.profile() as p:
        stops()
    assert p.trace.meta["error"].startswith("Speechless: (its text") and "Speechless" in repr(p)
    assert tpu_lab.trace.active is None, "the next profile can begin"
    with tpu_lab.profile() as after:
        pass
    assert "error" not in after.trace.meta


def test_a_learners_exception_without_text_is_a_hint_and_the_next_attempt_runs():
    sheet = check.Sheet("01", "One")
    view = sheet.do("1", check.attempt(stops), hints=["say it"])
    assert view.state == "fail" and "`stops` stopped in line 2: Speechless: (its text" in view.outcomes[0].rest
    unreadable = sheet.do("1", 5, test=stops, hints=["say it"])
    assert "cannot use this result (Speechless: (its text" in unreadable.outcomes[0].rest
    assert check.attempt(lambda: 5).profile is not None
