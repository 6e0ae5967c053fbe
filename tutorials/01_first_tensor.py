# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 01: your first tensor"
# description = "Put a tensor on the device, read what ran, bring a number back. About 20 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 01: your first tensor")

with app.setup:
    import marimo as mo
    import torch

    import tpu_lab

    check = tpu_lab.check
    sheet = check.Sheet("01", "Your first tensor")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 01: your first tensor

    **What runs when a tensor lives on the device, and when does a value come back?**

    You need some PyTorch and nothing else: without a TPU, the same programs run on this computer's own processor.
    About 20 minutes.

    Each part goes the same way: *predict* a number, or *do* a few lines; the *check* below ticks or gives a hint; then
    *look* at the record. A blank is a `...` in a cell that says what to fill in. Change it, run the cell, and the
    check follows.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 1.1 · Go there

    Importing `tpu_lab` registers a device that PyTorch calls `"tpu"`. A tensor is moved with `.to("tpu")`, or made there
    with `device="tpu"`. Ops on it run there, and their results stay there.

    Do: take a tensor from the CPU and give back its double, still on the device.
    """)
    return


@app.cell
def _():
    def double(x):
        return ...  # yours

    return (double,)


@app.cell(hide_code=True)
def _(double):
    def _test(tried):
        value = tried.value
        if not isinstance(value, torch.Tensor):
            return f"the result is a `{type(value).__name__}`, no tensor."
        if value.device.type != "tpu":
            return check.Disagree(f"the result is on `{value.device}`.", record="x.device")
        if not torch.equal(value.cpu(), torch.tensor([2.0, 4.0, 6.0])):
            return f"of `[1, 2, 3]` it made `{value.tolist()}`."
        return None

    go_there = sheet.do(
        "1.1",
        check.attempt(double, torch.tensor([1.0, 2.0, 3.0])),
        title="go there",
        test=_test,
        ran=(),
        right="It lives on the device.",
        why="The doubling ran there, and so its result is there, too.",
        todo="One line is enough.",
        hints=(
            "where is `x` when the function begins, and where should it be?",
            'a method moves it: `x.to("tpu")`.',
            "what is on the device is multiplied there, and what is on the CPU is multiplied here: move first.",
        ),
    )
    go_there
    return (go_there,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 1.2 · Count the ops

    An **op** is one thing that PyTorch does. Here is a line of them:

    ```python
    total = ((x * 2) + 1).relu().sum()
    ```

    Predict: how many ops reach the device?
    """)
    return


@app.cell
def _():
    ops = ...  # yours: a number
    return (ops,)


@app.cell(hide_code=True)
def _(ops):
    def line_of_ops(x):
        total = ((x * 2) + 1).relu().sum()
        return total.item()

    shown_ops = check.attempt(line_of_ops, torch.ones(4, 8, device="tpu"), mode="strict").profile
    count_ops = sheet.predict(
        "1.2",
        ops,
        len(shown_ops.trace.ops),
        title="count the ops",
        name="ops",
        right="Each of `mul`, `add`, `relu` and `sum` is one call of PyTorch's.",
        hints=("say the line aloud: what is done to `x` first, what then?", "a number such as `2` is no op."),
        record="p.ops",
    )
    count_ops
    return count_ops, shown_ops


@app.cell(hide_code=True)
def _(ops, shown_ops):
    mo.accordion({"Look: every op, in order": shown_ops.ops}) if ops is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 1.3 · The way back

    A result is a promise of the device. `print`, `.item()`, `.tolist()`, `.cpu()` and an `if` on a value need the
    number itself, so the host **waits** and bytes come back. `total` above was one float32 of a 4 × 8 tensor's sum.

    Predict: how many bytes did `.item()` bring back?
    """)
    return


@app.cell
def _():
    bytes_back = ...  # yours: a number
    return (bytes_back,)


@app.cell(hide_code=True)
def _(bytes_back, shown_ops):
    way_back = sheet.predict(
        "1.3",
        bytes_back,
        sum(wait.bytes for wait in shown_ops.trace.waits),
        title="the way back",
        name="bytes_back",
        right="One float32 has 32 bits. The 4 × 8 values it was summed from never left the device.",
        hints=("which tensor is asked for its value: `x`, or `total`?", "how many bits has one `float32`?"),
        record="p.trace.waits",
    )
    way_back
    return (way_back,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 1.4 · Read a record

    Reports write a tensor as dtype and shape: `f32[4,8]` has 4 × 8 float32 values, `s32[3]` three int32 values,
    `bf16[]` one bfloat16 value without dimensions.

    ```python
    a = torch.ones(2, 3, dtype=torch.bfloat16, device="tpu")
    b = (a + 1).sum(dim=0)
    ```

    Predict: how does a report write `b`? A text, such as `"f32[4,8]"`.
    """)
    return


@app.cell
def _():
    written = ...  # yours: a text
    return (written,)


@app.cell(hide_code=True)
def _(written):
    def notation():
        a = torch.ones(2, 3, dtype=torch.bfloat16, device="tpu")
        return (a + 1).sum(dim=0)

    _p = check.attempt(notation).profile
    read_record = sheet.predict(
        "1.4",
        written,
        _p.trace.ops[-1].outputs[0],
        title="read a record",
        name="written",
        right="A Python number does not change a tensor's dtype, and `dim=0` is summed away.",
        hints=(
            "two questions: which dtype has `a + 1`, and which dimension does `sum(dim=0)` take away?",
            "`torch.ones(2, 3)` has 2 rows. Summing over dimension 0 adds the rows.",
        ),
        record="p.ops.rows.result",
    )
    read_record
    return (read_record,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 1.5 · A gradient

    Autograd works as on any device. `w`, `x` and `y` are on the device already, and `w.requires_grad` is true.

    Do: the mean of the squared differences between `x @ w` and `y`, then `backward`, and give back the gradient of `w`.
    """)
    return


@app.cell
def _():
    def gradient(w, x, y):
        loss = ...  # yours
        loss.backward()
        return w.grad

    return (gradient,)


@app.cell(hide_code=True)
def _(gradient):
    torch.manual_seed(1)
    _x, _y, _w = torch.randn(16, 4), torch.randn(16), torch.randn(4)
    _there = [_w.to("tpu").requires_grad_(), _x.to("tpu"), _y.to("tpu")]

    def _test(tried):
        expected = 2 * _x.T @ (_x @ _w - _y) / 16
        got = tried.value.cpu()
        if got.shape != expected.shape:
            return f"a gradient has the shape of `w`, [4], and this has {list(got.shape)}."
        if torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
            return None
        ratio = (got / expected).mean().item()
        same = torch.allclose(got, expected * ratio, rtol=1e-3)
        return (
            f"the gradient is {ratio:.3g} times what it should be."
            if same
            else "the gradient differs from the one by hand."
        )

    tried_gradient = check.attempt(gradient, *_there)
    by_gradient = sheet.do(
        "1.5",
        tried_gradient,
        title="a gradient",
        test=_test,
        ran=("backward",),
        right="The gradient agrees with the one by hand.",
        why="Backward ops ran on the device, too: each names the forward op that it belongs to.",
        todo="One expression is enough.",
        hints=(
            "square the differences, then average: `.square()` and `.mean()`.",
            "`x @ w` is a vector of 16 predictions; the difference to `y` has 16 values.",
            "`loss = (x @ w - y)...`, and two methods more.",
        ),
    )
    by_gradient
    return by_gradient, tried_gradient


@app.cell(hide_code=True)
def _(by_gradient, tried_gradient):
    mo.accordion({"Look: forward and backward": tried_gradient.profile.ops}) if by_gradient.passed else None
    return


@app.cell(hide_code=True)
def _(by_gradient, count_ops, go_there, read_record, way_back):
    score = sheet.show(go_there, count_ops, way_back, read_record, by_gradient, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - A tensor on `"tpu"` is worked on there. Ops are recorded one by one, backward ops with their forward op.
    - Only a question for a value brings bytes back, and it is the value's own bytes.
    - A report writes `f32[4,8]`: dtype and shape.

    Next: `02_lower_an_op.py`, in which you teach the device an op.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
