# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 04: views and writes"
# description = "What costs nothing, what copies, and who sees a write in place. About 20 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 04: views and writes")

with app.setup:
    import marimo as mo
    import torch

    import tpu_lab

    check = tpu_lab.check
    sheet = check.Sheet("04", "Views cost nothing")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 04: views and writes

    **Which of these lines moves bytes, and who sees it when a tensor is written in place?**

    You need tutorials 01 and 03. About 20 minutes.

    On the device an array never changes: a program reads arrays and makes new ones. PyTorch has views, which share
    their memory, and writes in place. The device gives you both, and you can see at what cost.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 4.1 · Only looking

    ```python
    a = x.t()[1:3]
    b = a.unsqueeze(0)
    c = x.view(-1)
    ```

    Predict: how many launches does that take, in strict mode?
    """)
    return


@app.cell
def _():
    launches_views = ...  # yours: a number
    return (launches_views,)


@app.cell(hide_code=True)
def _(launches_views):
    def views(x):
        a = x.t()[1:3]
        b = a.unsqueeze(0)
        c = x.view(-1)
        return a, b, c

    looked = check.attempt(views, torch.zeros(4, 4, device="tpu"), mode="strict").profile
    only_looking = sheet.predict(
        "4.1",
        launches_views,
        len(looked.trace.launches),
        title="only looking",
        name="launches_views",
        right="A view is a note on how to read memory that is there already.",
        hints=("does one of these lines compute a new value?", "strict mode launches what has work to do."),
        record="p.ops",
    )
    only_looking
    return looked, only_looking


@app.cell(hide_code=True)
def _(launches_views, looked):
    mo.accordion({"Look: ops that are free": looked.ops}) if launches_views is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 4.2 · Who shares

    Predict: a write to which of these is seen in `x`? Four times `True` or `False`, in this order. `x` is a 3 × 4 tensor.

    ```python
    x.t()
    x.reshape(-1)
    x.t().reshape(-1)
    x + 0
    ```
    """)
    return


@app.cell
def _():
    shares = ...  # yours: a tuple of four
    return (shares,)


@app.cell(hide_code=True)
def _(shares):
    def _seen(view_of):
        x = torch.ones(3, 4, device="tpu")
        view_of(x).zero_()
        return x.sum().item() == 0

    who_shares = sheet.predict(
        "4.2",
        shares,
        (
            _seen(lambda x: x.t()),
            _seen(lambda x: x.reshape(-1)),
            _seen(lambda x: x.t().reshape(-1)),
            _seen(lambda x: x + 0),
        ),
        title="who shares",
        name="shares",
        right="`reshape` is a view where the order in memory allows one, and a copy where it does not.",
        hints=(
            "memory is one row after the other. Which of the four can be read from it by steps of equal size?",
            "the values of `x.t()` row by row are those of `x` column by column: is that one step size?",
            "arithmetic gives a new tensor, even if nothing changes.",
        ),
    )
    who_shares
    return (who_shares,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 4.3 · What a copy moves

    ```python
    y = x.t().contiguous()      # x: f32[256,256]
    ```

    `contiguous` reads every value once and writes it once, in the new order.

    Predict: how many bytes is that?
    """)
    return


@app.cell
def _():
    bytes_copied = ...  # yours: a number
    return (bytes_copied,)


@app.cell(hide_code=True)
def _(bytes_copied):
    def turned(x):
        return x.t().contiguous()

    copied = check.attempt(turned, torch.zeros(256, 256, device="tpu"), mode="strict").profile
    what_a_copy_moves = sheet.predict(
        "4.3",
        bytes_copied,
        sum(launch.bytes for launch in copied.trace.launches),
        title="what a copy moves",
        name="bytes_copied",
        right="Read once and written once: half a MiB for a matrix of a quarter.",
        hints=("how many values are there, and how many bytes has one float32?", "each is read, and each is written."),
        record="p.ops.rows.bytes",
    )
    what_a_copy_moves
    return (what_a_copy_moves,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 4.4 · Write through a view

    Do: multiply column `j` of `x` by `factor`, in place. The caller keeps its `x` and has to see the change. Give back
    nothing.
    """)
    return


@app.cell
def _():
    def scale_column(x, j, factor): ...  # yours

    return (scale_column,)


@app.cell(hide_code=True)
def _(scale_column):
    _x = torch.arange(12.0).reshape(3, 4)
    _there, _moved = _x.to("tpu"), torch.arange(12.0).reshape(3, 4)
    _moved[:, 2] *= 10

    def _test(tried):
        now = _there.cpu()
        if torch.equal(now, _x):
            return "the caller's `x` has not changed."
        if torch.equal(now, _moved):
            return None
        i, j = (now != _moved).nonzero()[0].tolist()
        return check.Disagree(f"`x[{i}, {j}]` is {now[i, j]:g} and should be {_moved[i, j]:g}.", record=f"x[{i}, {j}]")

    through_a_view = sheet.do(
        "4.4",
        check.attempt(scale_column, _there, 2, 10.0, name="scale_column", mode="fused", gives=False, fresh=True),
        title="write through a view",
        test=_test,
        par={"launches": 1, "misses": 1},
        ran=(),
        right="The caller sees it.",
        why="The column is a view; the write makes a new array for the whole of `x`, and all its views know.",
        todo="One line is enough.",
        hints=(
            "`x = x * factor` gives the name `x` a new tensor, and the caller keeps the old one.",
            "column `j` is a view: `x[:, j]`.",
            "`*=` writes into what stands at its left.",
        ),
    )
    through_a_view
    return (through_a_view,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 4.5 · Half the memory

    This works, and needs three matrices at its end: `x`, the difference and the result.

    ```python
    y = x - x.mean(1, keepdim=True)
    return y / y.abs().amax(1, keepdim=True)
    ```

    Do: the same in place. Give back `x` itself, and let no second matrix stay alive from one op to the next.
    """)
    return


@app.cell
def _():
    def normalise(x):
        ...  # yours
        return x

    return (normalise,)


@app.cell(hide_code=True)
def _(normalise):
    torch.manual_seed(0)
    _x = torch.randn(256, 256)
    _there = _x.to("tpu")
    _y = _x - _x.mean(1, keepdim=True)
    _expected = _y / _y.abs().amax(1, keepdim=True)

    def _test(tried):
        if tried.value is not _there:
            return "what comes back is not the `x` that went in."
        if not torch.allclose(_there.cpu(), _expected, rtol=1e-4, atol=1e-5):
            return "the values are not those of the two lines above."
        made = [op for op in tried.profile.trace.ops if "f32[256,256]" in op.outputs and op.kind != "view"]
        extra = [op for op in made if not op.name.split(".")[1].endswith("_") and op.name.split(".")[1] != "abs"]
        if extra:
            return check.Disagree(
                f"`{extra[0].name}` makes a matrix of its own.", at=extra[0], record=f"p.ops.rows.loc[{extra[0].index}]"
            )
        return None

    tried_normalise = check.attempt(normalise, _there, name="normalise", mode="fused", fresh=True)
    half_the_memory = sheet.do(
        "4.5",
        tried_normalise,
        title="half the memory",
        test=_test,
        par={"launches": 1, "misses": 1},
        ran=("elementwise", "reduce"),
        right="One matrix goes in and the same one comes out.",
        why="The program may write its result over its input, as nobody else reads that: the input is donated.",
        todo="Two lines are enough.",
        hints=(
            "which operator subtracts in place, and which divides?",
            "`x -= ...` and `x /= ...`: each writes into `x`.",
            "after the first line `x` holds what the second line above calls `y`.",
        ),
    )
    half_the_memory
    return half_the_memory, tried_normalise


@app.cell(hide_code=True)
def _(half_the_memory, tried_normalise):
    mo.accordion({"Look: who holds the memory": tried_normalise.profile.memory}) if half_the_memory.passed else None
    return


@app.cell(hide_code=True)
def _(half_the_memory, only_looking, through_a_view, what_a_copy_moves, who_shares):
    score = sheet.show(only_looking, who_shares, what_a_copy_moves, through_a_view, half_the_memory, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - Views are free, and a write through one is seen by all who share the memory.
    - `reshape` may copy. A copy reads and writes every byte.
    - In place means: the old array may become the new one, so that the memory is held once.

    Next: `05_fusion_boundaries.py`.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
