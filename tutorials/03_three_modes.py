# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 03: three modes"
# description = "Strict, debug, fused: when ops run, and how a training step becomes one launch. About 20 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 03: three modes")

with app.setup:
    import marimo as mo
    import torch
    from torch import nn

    import tpu_lab

    check = tpu_lab.check
    sheet = check.Sheet("03", "One launch a step")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 03: three modes

    **When does an op run, and how few launches can a training step have?**

    You need tutorial 01. About 20 minutes.

    The **eager mode** decides *when* ops run, never what they compute:

    - **strict** launches each op at once, and the host goes on;
    - **debug** launches each op at once and waits until it is done, so that an error shows at its own line;
    - **fused** lets ops wait until somebody needs a value, and launches them together.
    """)
    return


@app.function
def work(x):
    """Five ops in a chain."""
    y = x * 2
    y = y + 1
    y = y.relu()
    y = y * y
    return y.sum()


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 3.1 · Strict

    ```python
    y = x * 2
    y = y + 1
    y = y.relu()
    y = y * y
    return y.sum()
    ```

    Predict: how many launches in strict mode?
    """)
    return


@app.cell
def _():
    launches_strict = ...  # yours: a number
    return (launches_strict,)


@app.cell(hide_code=True)
def _(launches_strict):
    x = torch.ones(64, 128, device="tpu")
    strict = check.attempt(work, x, mode="strict", fresh=True).profile
    in_strict = sheet.predict(
        "3.1",
        launches_strict,
        len(strict.trace.launches),
        title="strict",
        name="launches_strict",
        right=f"Strict launches each of the {len(strict.trace.ops)} ops on its own.",
        hints=("in strict mode no op waits for another.", "count the ops: tutorial 01 did the same."),
        record="p.trace.launches",
    )
    in_strict
    return in_strict, x


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 3.2 · Fused

    The same lines in fused mode, and the result is looked at once, at the end. The function is called twice.

    Predict: how many launches in all, and how many of them are misses (a program had to be made)? A tuple.
    """)
    return


@app.cell
def _():
    fused_twice = ...  # yours: (launches, misses)
    return (fused_twice,)


@app.cell(hide_code=True)
def _(fused_twice, x):
    def _looked_at(x):
        return work(x).item()

    fused = check.attempt(_looked_at, x, mode="fused", steps=2, fresh=True).profile
    in_fused = sheet.predict(
        "3.2",
        fused_twice,
        (len(fused.trace.launches), check.measure(fused, "misses")),
        title="fused",
        name="fused_twice",
        right="The ops wait for the look and run as one program. The second call finds it made.",
        hints=(
            "how many looks are there, and what runs at a look?",
            "the second call does the same ops on the same shapes.",
        ),
        record="p.cache",
    )
    in_fused
    return fused, in_fused


@app.cell(hide_code=True)
def _(fused, fused_twice):
    mo.accordion({"Look: hits and misses by call site": fused.cache}) if fused_twice is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 3.3 · A mode for a block

    `torch.tpu.set_eager_mode("fused")` in a `with` statement sets the mode inside its block. The check calls your
    function in strict mode.

    Do: give back `work(x)`, computed in one launch whatever the mode outside.
    """)
    return


@app.cell
def _():
    def quick(x):
        with ...:  # yours
            return work(x)

    return (quick,)


@app.cell(hide_code=True)
def _(quick, x):
    def _test(tried):
        if not isinstance(tried.value, torch.Tensor) or tried.value.device.type != "tpu":
            return "the result is no tensor on the device."
        return None if tried.value.item() == 64 * 128 * 9.0 else "the value is not that of `work(x)`."

    tried_quick = check.attempt(quick, x, name="quick", mode="strict", fresh=True)
    for_a_block = sheet.do(
        "3.3",
        tried_quick,
        title="a mode for a block",
        test=_test,
        par={"launches": 1, "misses": 1, "bytes": 64 * 128 * 4 + 4},
        ran=("elementwise", "reduce"),
        right="One launch.",
        why="Only `x` was read and only the sum was written: what is between lives inside the program.",
        todo="One call is enough.",
        hints=(
            "which object of `torch.tpu` is a context manager for the mode? It is named above.",
            "its argument is the mode's name, a text.",
            "`with torch.tpu.set_eager_mode(...)`, and the work inside its block.",
        ),
    )
    for_a_block
    return (for_a_block,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 3.4 · Debug

    Debug mode is the one for finding errors.

    Predict: how many launches has `work(x)` in debug mode?
    """)
    return


@app.cell
def _():
    launches_debug = ...  # yours: a number
    return (launches_debug,)


@app.cell(hide_code=True)
def _(launches_debug, x):
    debug = check.attempt(work, x, mode="debug").profile
    in_debug = sheet.predict(
        "3.4",
        launches_debug,
        len(debug.trace.launches),
        title="debug",
        name="launches_debug",
        right="As in strict; only the host waits after each of them.",
        hints=("read what debug does in the list at the top: what differs from strict?",),
        record="p.trace.launches",
    )
    in_debug
    return (in_debug,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 3.5 · Read the loss without a flush

    In fused mode a training step may be *one* launch: forward, backward and optimizer together. It ends by itself when
    `opt.step()` is done. A look before that **flushes** the graph: what waits has to run, and the rest comes in a
    second launch.

    Do: give back the loss of each step, as a list of numbers, with one launch a step. What do you keep in the loop, and
    when do you read it?
    """)
    return


@app.cell
def _():
    def train(model, opt, batches):
        losses = []
        for x, y in batches:
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(...)  # yours
            opt.step()
            opt.zero_grad()
        return ...  # yours

    return (train,)


@app.function(hide_code=True)
def start():
    """A small model, its optimizer and eight batches, the same each time, on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to("tpu")
    batches = [(torch.randn(8, 16).to("tpu"), torch.randn(8, 1).to("tpu")) for _ in range(8)]
    return model, torch.optim.AdamW(model.parameters(), 1e-2), batches


@app.cell(hide_code=True)
def _(train):
    def _given(model, opt, batches):
        losses = []
        for x, y in batches:
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
        return losses

    _expected = _given(*start())

    def _test(tried):
        trace, losses = tried.profile.trace, tried.value
        if len(losses) != len(_expected):
            return f"{len(_expected)} losses are asked for, and these are {len(losses)}."
        if not all(isinstance(loss, float) for loss in losses):
            return "the list should hold numbers: a tensor still has to be read."
        if not torch.allclose(torch.tensor(losses), torch.tensor(_expected), rtol=1e-4):
            return "the losses are not those of the loop as it was."
        if len(trace.steps) != len(_expected):
            return f"the optimizer stepped {len(trace.steps)} times, not {len(_expected)}."
        after = [launch for launch in trace.launches if launch.step == len(trace.steps) and launch.cache != "hit"]
        early = [launch for launch in trace.launches if launch.reason != "step end" and launch.step < len(trace.steps)]
        if len(early) < 2 and after:
            ops = ", ".join(dict.fromkeys(trace.ops[i].name.split(".")[1] for i in after[0].ops))
            return check.Disagree(
                f"the steps are right, and `{after[0].code.partition('  #')[0]}` makes one program more after them, for `{ops}`: "
                "read the losses one by one.",
                at=after[0],
                record=f"p.trace.launches[{after[0].index}]",
            )
        if len(early) < 2:
            return None
        late = [op for op in trace.ops if op.launch is not None and op.phase == "optimizer"]
        n = len(late) // len(trace.steps)
        return check.Disagree(
            f"`{early[1].code.partition('  #')[0]}` flushes the graph in each step, before the optimizer's {n} ops are recorded.",
            at=early[1],
            record=f"p.trace.launches[{early[1].index}]",
        )

    tried_train = check.attempt(train, *start(), name="train", mode="fused", fresh=True)
    without_flush = sheet.do(
        "3.5",
        tried_train,
        title="read the loss without a flush",
        test=_test,
        par={"launches": 1, "misses": 2},
        ran=check.TRAINING,
        right="One launch a step.",
        why="The first two steps make a program each, as the optimizer's state is new in the first.",
        todo="Two short expressions are enough.",
        hints=(
            "what if the loss is read after `opt.step()`, or after the loop?",
            "keep the tensors in the list: `loss.detach()` keeps the value without its graph.",
            "read them all at the end: a list of `.item()` of what you kept.",
        ),
    )
    without_flush
    return tried_train, without_flush


@app.cell(hide_code=True)
def _(tried_train):
    mo.accordion({"Look: where the groups end, and why": tried_train.profile.fusions}) if tried_train.profile else None
    return


@app.cell(hide_code=True)
def _(for_a_block, in_debug, in_fused, in_strict, without_flush):
    score = sheet.show(in_strict, in_fused, for_a_block, in_debug, without_flush, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - Strict and debug launch each op; fused launches what has gathered when a value is needed or a step ends.
    - One look in the middle of a step costs a launch, each time.
    - Values that are only read can be read later.

    Next: `04_views_and_writes.py`.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
