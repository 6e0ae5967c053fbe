# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 05: fusion boundaries"
# description = "A training step in four launches becomes one. See what fusing saves, and which line ends it. About 25 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 05: fusion boundaries")

with app.setup:
    import marimo as mo
    import torch
    import torch.nn.functional as F

    from tpu_lab import check
    from tpu_lab.models import resnet
    from tpu_lab.viz import page

    sheet = check.Sheet("05", "One launch a step")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 05: fusion boundaries

    **Which line of a training step ends a launch, and what does each end cost?**

    You need tutorials 01 to 04. About 25 minutes.

    A launch ends where the host asks for a value. Within a launch the compiler puts ops together in **fusion groups**:
    what is between two ops of a group is never written to memory.
    """)
    return


@app.function(hide_code=True)
def chain(x):
    """Four ops, each of which reads and writes arrays of x's size."""
    y = x * 2
    y = y + 1
    y = y.tanh()
    return y * x


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 5.1 · What fusing saves

    ```python
    y = x * 2
    y = y + 1
    y = y.tanh()
    return y * x
    ```

    This chain runs on `x: f32[256,1024]`, which is exactly 1 MiB. In strict mode each op reads its arrays from memory
    and writes its result there. In fused mode the four are one group: it reads `x` and writes the last result.

    Predict: how many MiB of reading and writing does fusing save?
    """)
    return


@app.cell
def _():
    mib_saved = ...  # yours: a number
    return (mib_saved,)


@app.cell(hide_code=True)
def _():
    _x = torch.ones(256, 1024, device="tpu")
    chain_strict = check.attempt(chain, _x, mode="strict", fresh=True).profile
    chain_fused = check.attempt(chain, _x, mode="fused", fresh=True).profile
    chain_moved = [round(check.measure(p, "bytes") / 2**20) for p in (chain_strict, chain_fused)]
    return chain_fused, chain_moved


@app.cell(hide_code=True)
def _(chain_moved, mib_saved):
    what_it_saves = sheet.predict(
        "5.1",
        mib_saved,
        chain_moved[0] - chain_moved[1],
        title="what fusing saves",
        name="mib_saved",
        right=f"Op by op it moves {chain_moved[0]} MiB, as one group {chain_moved[1]} MiB.",
        hints=(
            "count arrays, op by op: how many does `x * 2` read and write, how many `y * x`?",
            "three ops move two arrays each, the last one moves three.",
            "the group reads `x` once, though two ops want it, and writes one array. Take that off.",
        ),
        record="p.ops.rows",
    )
    what_it_saves
    return (what_it_saves,)


@app.cell(hide_code=True)
def _(chain_fused, mib_saved):
    mo.accordion({"Look: one group, and what it saves": chain_fused.fusions}) if mib_saved is not ... else None
    return


@app.function(hide_code=True)
def chatty(model, optimizer, images, labels):
    """A training step that tells its loss and the part of the digits read right."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    seen = loss.item()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if norm > 1:
        for p in model.parameters():
            p.grad /= norm
    optimizer.step()
    optimizer.zero_grad()
    right = (logits.argmax(1) == labels).float().mean().item()
    return seen, right


@app.function(hide_code=True)
def start():
    """A small residual network on the device, its optimizer, and 32 real digits with their labels: the same each time."""
    torch.manual_seed(0)
    model = resnet.Model(resnet.Config(blocks=(1,), width=8)).to("tpu")
    images, labels = (part.to("tpu") for part in resnet.batch(model.config, 32))
    return model, torch.optim.SGD(model.parameters(), lr=0.05), images, labels


@app.cell(hide_code=True)
def _():
    before = check.attempt(chatty, *start(), mode="fused", steps=4, fresh=True)
    # Launches and lines are those of the second step: the first one makes the programs.
    second = [launch for launch in before.profile.trace.launches if before.line_of(launch)]
    second = second[len(second) // 4 : len(second) // 2]
    page.code("\n".join(f"{number:3}  {line}" for number, line in enumerate(before.source, 1)))
    return before, second


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 5.2 · Count the ends

    The training step above is a residual network that reads digits. It runs in **fused** mode. A launch ends at a
    question for a value, and at the end of `optimizer.step()`.

    Predict: how many launches does one step take?
    """)
    return


@app.cell
def _():
    launches = ...  # yours: a number
    return (launches,)


@app.cell(hide_code=True)
def _(before, launches):
    count_ends = sheet.predict(
        "5.2",
        launches,
        check.measure(before.profile, "launches"),
        title="count the ends",
        name="launches",
        right="Three questions, and the end of the optimizer's step.",
        hints=(
            "which lines need a number, not a tensor? `.item()` is one way to ask. There is another.",
            "an `if` on a tensor asks for its value, too.",
            "what is asked after `optimizer.step()` has to run on its own.",
        ),
        record="p.trace.launches",
    )
    count_ends
    return (count_ends,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 5.3 · The second end

    Each launch record names the line that forced it. The lines of the step are numbered above.

    Predict: which line ends the **second** launch of a step?
    """)
    return


@app.cell
def _():
    line = ...  # yours: a line's number
    return (line,)


@app.cell(hide_code=True)
def _(before, line, second):
    _at = before.line_of(second[1])
    second_end = sheet.predict(
        "5.3",
        line,
        _at,
        title="the second end",
        name="line",
        right=f"`{second[1].code}` needs the gradients' norm: forward is over, backward ran for it, the optimizer waits.",
        hints=(
            "the first launch ends at the first `.item()`. Read on from there.",
            "`backward` and the norm only record ops. Who asks for a value next?",
        ),
        record="p.trace.launches[1]",
    )
    second_end
    return (second_end,)


@app.cell(hide_code=True)
def _(before, line):
    mo.accordion({"Look: each launch, and the line that ended it": before.profile.fusions}) if line is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 5.4 · Choose without asking

    `if norm > 1: p.grad /= norm` asks the device, so the host waits. The same can be said without a question: always
    multiply by a factor, and let the *device* work out the factor.

    Do: give back the factor as a tensor on the device: 1 where the norm is at most 1, else 1 / norm. Nothing may
    wait: the check looks at your factor when the function is over, and that is the only launch.
    """)
    return


@app.cell
def _():
    def factor(norm):
        return ...  # yours: a tensor

    return (factor,)


@app.cell(hide_code=True)
def _(factor):
    _norms = torch.tensor([0.25, 1.0, 4.0])
    _tried = [check.attempt(factor, norm.to("tpu"), name="factor", mode="fused") for norm in _norms]

    def _asked(one):  # here or in a function that is called from here; what goes to the device asks for nothing
        return [wait for wait in one.profile.trace.waits if wait.what != "to tpu"] if one.profile else []

    def _test(tried):
        for one, norm in zip(_tried, _norms.tolist(), strict=True):
            if not isinstance(one.value, torch.Tensor) or one.value.device.type != "tpu":
                return f"for a norm of {norm:g} the result is {one.value!r}, no tensor on the device."
            if not abs(one.value.item() - min(1.0, 1 / norm)) <= 1e-6:
                return f"for a norm of {norm:g} the factor is {one.value.item():.3g}, not {min(1.0, 1 / norm):.3g}."
        if not (asked := _asked(tried)):
            return None
        line = asked[0].code.partition("  #")[0] or asked[0].what
        return check.Disagree(f"`{line}` waits for a value.", at=asked[0], record="p.trace.waits")

    _worst = max(_tried, key=lambda one: (bool(one.error), len(_asked(one))))
    without_asking = sheet.do(
        "5.4",
        _worst,
        title="choose without asking",
        test=_test,
        par={"launches": 1},
        ran=(),
        right="Nobody asked.",
        why="The one launch is the check's own look. The factor is recorded like any other op, and becomes part of the step's program.",
        todo="One line is enough.",
        hints=(
            "an `if`, `min(1, ...)` or `float(...)` of Python's asks for the value. Tensor methods do not.",
            "1 / norm is too large where the norm is below 1. What if the norm could not be below 1?",
            "`norm.clamp(min=...)` does not ask; `torch.where` does not, either.",
        ),
    )
    without_asking
    return (without_asking,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 5.5 · One launch a step

    Do: the same step in **one** launch. Same weights afterwards; give back the loss and the part read right, as tensors:
    who wants the numbers can ask later. Copy `chatty` and change it. Mind *when* each thing is recorded: whatever comes
    after `optimizer.step()` is too late for its launch.
    """)
    return


@app.cell
def _():
    def quiet(model, optimizer, images, labels):
        return ...  # yours: loss, right

    return (quiet,)


@app.cell(hide_code=True)
def _(before, quiet):
    _start = start()
    tried_quiet = check.attempt(quiet, *_start, name="quiet", mode="fused", steps=4, fresh=True)

    def _test(tried):
        if not isinstance(tried.value, tuple | list) or len(tried.value) != 2:
            return "two values are asked for: the loss, and the part read right."
        _reference = start()
        for _ in range(4):
            chatty(*_reference)
        for (name, mine), (_, theirs) in zip(
            _start[0].named_parameters(), _reference[0].named_parameters(), strict=True
        ):
            if not torch.allclose(mine.detach().cpu(), theirs.detach().cpu(), rtol=1e-3, atol=1e-5):
                return f"after four steps the weight `{name}` is not what `chatty` makes of it."
        for value, name, expected in zip(tried.value, ("loss", "part read right"), before.value, strict=True):
            if not abs(float(value) - expected) <= 1e-3:
                return f"the {name} is {float(value):.3g}, not {expected:.3g}."
        early = [launch for launch in tried.profile.trace.launches if launch.reason != "step end"]
        if early:
            return check.Disagree(
                f"`{early[0].code.partition('  #')[0] or early[0].reason}` ends a launch: {len(early)} of {len(tried.profile.trace.launches)} launches "
                "are not a step's end.",
                at=early[0],
                record=f"p.trace.launches[{early[0].index}]",
            )
        return None

    one_launch = sheet.do(
        "5.5",
        tried_quiet,
        title="one launch a step",
        test=_test,
        par={"launches": 1, "misses": 1, "bytes": 118680},  # what the answers reach: tests/test_tutorials.py holds it
        ran=check.TRAINING,
        right="One launch a step.",
        why="Forward, backward, clipping, update and the part read right are one program.",
        todo="Four lines of `chatty` change.",
        hints=(
            "take the two `.item()` away first, then the `if`: you have its factor from 5.4.",
            "`right` has to be recorded before `optimizer.step()`: the logits are there early.",
            "`p.grad *= factor(norm)` for each parameter, without an `if`; detach the loss you give back.",
        ),
    )
    one_launch
    return one_launch, tried_quiet


@app.cell(hide_code=True)
def _(before, one_launch, tried_quiet):
    mo.accordion({"Look: what changed": before.profile.diff(tried_quiet.profile)}) if one_launch.passed else None
    return


@app.cell(hide_code=True)
def _(count_ends, one_launch, second_end, what_it_saves, without_asking):
    score = sheet.show(what_it_saves, count_ends, second_end, without_asking, one_launch, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - A group reads what comes in and writes what goes out: what is between costs no memory traffic.
    - `.item()`, and an `if` on a tensor, end a launch. So does the end of the optimizer's step.
    - The order matters: what is recorded before the step's end runs in its launch.

    Next: `06_compile_cache.py`, in which programs are made again and again, until they are not.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
