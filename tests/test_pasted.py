"""Pasted code: which model it makes, the inputs it asks for, and its errors as one sentence with the line."""

import pytest
import torch

from tpu_lab import pasted

NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)
"""


def told(code, run=pasted.model_of):
    with pytest.raises((Exception, SystemExit)) as caught:
        run(code)
    sentence = pasted.said(caught.value, code, "The code")
    assert "\n" not in sentence and "Traceback" not in sentence
    return sentence


@pytest.mark.parametrize("text", ["4, 8", "4,8", "(4, 8)", "[4, 8]", "f32[4,8]", "bf16[4, 8]", "i64 [4, 8]"])
def test_a_shape_may_be_written_in_several_ways(text):
    (made,) = pasted.inputs(text)
    assert made.shape == (4, 8)
    assert made.dtype == {"b": torch.bfloat16, "i": torch.int64}.get(text[0], torch.float32)


def test_several_inputs_and_the_same_each_time():
    ids, x = pasted.inputs("i64[3, 5]; 2")
    assert ids.flatten().tolist() == [*range(10), *range(5)] and torch.equal(x, pasted.inputs("2")[0])


@pytest.mark.parametrize("text", ["", "4 x 8", "f99[4]", "four", "[4", "4, 8;", "(4]"])
def test_what_is_no_shape_is_told_how_to_write_one(text):
    with pytest.raises(ValueError, match="is no shape: write 8, 3, 32, 32 or i64"):
        pasted.inputs(text)


def test_a_huge_or_empty_input_is_refused():
    for text in ("100000, 100000", "0, 4"):
        with pytest.raises(ValueError, match="from 1 to 16,777,216 can be tried here"):
            pasted.inputs(text)


def test_the_last_model_is_taken_and_else_the_last_class():
    assert type(pasted.model_of(NET)).__name__ == "Net"
    wider = NET.replace("self)", "self, width)", 1).replace("8, 4", "8, width") + "model = Net(width=5)\n"
    assert pasted.model_of(wider).layer.out_features == 5
    assert isinstance(pasted.model_of("import torch.nn as n\nmodel = n.Sequential(n.ReLU())"), torch.nn.Sequential)
    assert torch.equal(pasted.model_of(NET).layer.weight, pasted.model_of(NET).layer.weight), (
        "the same weights each time"
    )


def test_without_a_model_it_says_what_to_paste():
    assert told("x = 1") == "The code: it makes no nn.Module: paste a class Net(nn.Module), or end with model = …"
    needs = NET.replace("self)", "self, width, *rest, depth=2)", 1)
    assert told(needs) == "The code: Net needs width: end with model = Net(width=…)"


def test_errors_name_the_line():
    assert told(NET.replace("return", "retrun")).startswith("Line 7, “retrun self.layer(x)”: Python cannot read it, ")
    assert told("import nosuch") == "Line 1, “import nosuch”: ModuleNotFoundError, No module named 'nosuch'"
    assert told("x = 1\nexit()") == "Line 2, “exit()”: SystemExit, this ends the program"
    shape = told(NET, lambda code: pasted.model_of(code)(torch.ones(2, 7)))
    assert shape.startswith("Line 7, “return self.layer(x)”: RuntimeError, mat1 and mat2 shapes cannot be multiplied")
    assert told(NET, lambda code: pasted.model_of(code)()).startswith("The code: TypeError, ")


@pytest.mark.parametrize(
    "code", ["x = 0\nwhile True:\n    x = x + 1", "while True:\n    try:\n        x = 1\n    except Exception:\n        pass"]
)
def test_code_without_an_end_is_stopped(monkeypatch, code):
    monkeypatch.setattr(pasted, "PATIENCE", 0.2)

    def run(code):
        with pasted.within_patience():
            pasted.model_of(code)

    with pytest.raises(pasted.TookTooLong) as caught:
        run(code)
    sentence = pasted.said(caught.value, code, "The code")
    assert sentence.startswith("Line ") and sentence.endswith("it was still running after 0.2 s, and was stopped")
    from tpu_lab.lessons import your_model

    assert your_model.look(code, "4, 8", "cpu").fault.endswith("and was stopped")


def test_what_ends_in_time_is_left_alone(monkeypatch):
    monkeypatch.setattr(pasted, "PATIENCE", 0.01)
    for _ in range(50):  # the watch may strike at the very end
        try:
            with pasted.within_patience():
                sum(range(20_000))
        except pasted.TookTooLong:
            continue
        assert sum(range(200_000)) > 0
