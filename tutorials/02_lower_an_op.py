# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 02: lower an op yourself"
# description = "An op that the device does not know runs on the CPU and cuts your program. Teach the device. About 20 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 02: lower an op yourself")

with app.setup:
    import tpu_lab  # before jax: it tells jax whether a chip is there, and jax does not have to look

    # isort: split
    import warnings

    import jax.numpy as jnp
    import marimo as mo
    import torch

    from tpu_lab import check

    aten = torch.ops.aten
    sheet = check.Sheet("02", "An op of your own")
    if not hasattr(torch.ops.lesson, "laguerre"):
        torch.library.define("lesson::laguerre", "(Tensor x, int n) -> Tensor")
        torch.library.impl("lesson::laguerre", "cpu")(torch.special.laguerre_polynomial_l)
        torch.library.register_fake("lesson::laguerre")(lambda x, n: torch.empty_like(x))
    warnings.simplefilter("ignore", tpu_lab.FallbackWarning)  # this lesson is about what it warns of


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 02: lower an op yourself

    **What happens to an op that the device does not know, and how do you teach it one?**

    You need tutorial 01, and a glance at `jax.numpy`, which looks like NumPy. About 20 minutes.

    PyTorch has some two thousand ops. For each that the device knows there is a **lowering**: a plain function over jax
    arrays that says what the op computes. XLA compiles it. An op without one runs on the CPU: a **fallback**.
    """)
    return


@app.function(hide_code=True)
def wave(x):
    """Three ops. The middle one, the spherical Bessel function j0(v) = sin(v) / v, has no lowering."""
    y = x * 2
    y = torch.special.spherical_bessel_j0(y)
    return y + 1


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 2.1 · Where it is cut

    ```python
    y = x * 2
    y = torch.special.spherical_bessel_j0(y)
    return y + 1
    ```

    Call these three ops `wave(x)`. In fused mode ops wait and then run together, in one **launch**. But the op in the
    middle has no lowering: it needs its input on the CPU.

    Predict: how many launches on the device does `wave(x)` take?
    """)
    return


@app.cell
def _():
    launches = ...  # yours: a number
    return (launches,)


@app.cell(hide_code=True)
def _(launches):
    x = torch.linspace(0, 6, 256).to("tpu")
    before = check.attempt(wave, x, mode="fused", fresh=True).profile
    where_cut = sheet.predict(
        "2.1",
        launches,
        len(before.trace.launches),
        title="where it is cut",
        name="launches",
        right="One before the fallback and one after it, with a way to the CPU and back between them.",
        hints=("which ops can run before the CPU is asked, and which only afterwards?", "`mul` | CPU | `add`."),
        record="p.trace.launches",
    )
    where_cut
    return before, where_cut, x


@app.cell(hide_code=True)
def _(before, launches):
    mo.accordion({"Look: the op in the middle ran on the host": before.ops}) if launches is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 2.2 · Your lowering

    In the package a lowering is registered by a decorator:

    ```python
    @op(aten.special_spherical_bessel_j0, promote="float")
    def j0(x):
        ...
    ```

    `x` is a jax array, and so is what comes back. No batching, no device, no gradient: only what is computed. Here the
    check registers your function for one run and takes it away again, so you can try as often as you like.

    Do: j0(x) = sin(x) / x, and j0(0) = 1. `jnp` is there.
    """)
    return


@app.cell
def _():
    def j0(x):
        return ...  # yours

    return (j0,)


@app.cell(hide_code=True)
def _(j0, x):
    def _test(tried):
        expected, got = wave(x.cpu()), tried.value.cpu()
        if any(op.fallback for op in tried.profile.trace.ops):
            return "the op still runs on the CPU."
        if got.shape != expected.shape:
            return f"the shape became {list(got.shape)}, and an elementwise op keeps it."
        wrong = ~torch.isclose(got, expected, rtol=1e-5, atol=1e-6)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            return check.Disagree(
                f"at `x = {2 * x[at].item():.3g}` your `j0` gives `{got[at].item() - 1:.4g}`, and PyTorch "
                f"`{expected[at].item() - 1:.4g}`; {int(wrong.sum())} of 256 values disagree.",
                record=f"x[{at}]",
            )
        return None

    with check.lowered(aten.special_spherical_bessel_j0, j0, promote="float"):
        tried_j0 = check.attempt(wave, x, shows=j0, name="j0", mode="fused", fresh=True)
    lowering = sheet.do(
        "2.2",
        tried_j0,
        title="your lowering",
        test=_test,
        par={"launches": 1, "misses": 1},
        right="One launch.",
        why="The compiler sees all three ops at once, and makes one loop of them.",
        todo="One line is enough.",
        hints=(
            "`jnp.sin(x) / x` is nearly it. What is 0 / 0?",
            "`jnp.where(x == 0, 1, ...)` chooses value by value.",
            "NumPy's `sinc(v)` is sin(πv) / (πv), with 1 at 0: which `v` makes πv your `x`?",
        ),
    )
    lowering
    return lowering, tried_j0


@app.cell(hide_code=True)
def _(lowering, tried_j0):
    mo.accordion({"Look: one group, one launch": tried_j0.profile.fusions}) if lowering.passed else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 2.3 · What you got for nothing

    PyTorch describes each op by a **schema**. From it the device derives the forms that write into a tensor: one
    lowering serves `f(x)` and `f(x, out=y)`.

    And `promote="float"` said: bring whole numbers to float first, as PyTorch does.

    Predict: do these two work with your lowering? A tuple of `True` or `False`, in this order:

    ```python
    torch.special.spherical_bessel_j0(x, out=y)                           # y: f32[256] on the device
    torch.special.spherical_bessel_j0(torch.arange(4, device="tpu"))      # whole numbers
    ```
    """)
    return


@app.cell
def _():
    both_work = ...  # yours: a tuple, such as (True, False)
    return (both_work,)


@app.cell(hide_code=True)
def _(both_work, x):
    def _works(fn):
        tried = check.attempt(fn)
        return not tried.error and not any(op.fallback for op in tried.profile.trace.ops)

    def _out():
        y = torch.empty(256, device="tpu")
        torch.special.spherical_bessel_j0(x, out=y)
        return y

    def _whole():
        return torch.special.spherical_bessel_j0(torch.arange(4, device="tpu"))

    with check.lowered(aten.special_spherical_bessel_j0, lambda v: jnp.cos(v), promote="float"):
        _actual = (_works(_out), _works(_whole))
    for_nothing = sheet.predict(
        "2.3",
        both_work,
        _actual,
        title="what you got for nothing",
        name="both_work",
        right="You wrote what is computed; where it is written and in which dtype follow from the schema.",
        hints=(
            "read the two sentences above once more: does either name an exception?",
            "nothing is left to do by hand.",
        ),
    )
    for_nothing
    return (for_nothing,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 2.4 · An op with arguments

    An op may be your own, too: the setup cell defines `lesson::laguerre(Tensor x, int n)` with `torch.library`, and gives
    it PyTorch's function on the CPU. Laguerre's polynomials begin with L₀ = 1 and L₁ = 1 − x, and go on with

    (k + 1) Lₖ₊₁ = (2k + 1 − x) Lₖ − k Lₖ₋₁.

    What is no tensor reaches a lowering as it is: `n` is a Python number, and a plain `for` is unrolled into the program.

    Do: what is missing. `last` is Lₖ₋₁ and `this` is Lₖ.
    """)
    return


@app.cell
def _():
    def laguerre(x, n):
        last, this = jnp.ones_like(x), 1 - x
        for k in range(1, n):
            last, this = this, (... - k * last) / (k + 1)  # yours
        return this

    return (laguerre,)


@app.cell(hide_code=True)
def _(laguerre):
    _x = torch.linspace(0, 4, 64).to("tpu")

    def _fifth(x):
        return torch.ops.lesson.laguerre(x, 5)

    def _test(tried):
        expected, got = _fifth(_x.cpu()), tried.value.cpu()
        if got.shape != expected.shape:
            return f"the shape became {list(got.shape)}, and an elementwise op keeps it."
        wrong = ~torch.isclose(got, expected, rtol=1e-4, atol=1e-4)
        if not wrong.any():
            return None
        at = int(wrong.nonzero()[0])
        return check.Disagree(
            f"L₅({_x[at].item():.3g}) should be `{expected[at].item():.4g}`, and yours gives `{got[at].item():.4g}`.",
            record=f"x[{at}]",
        )

    with check.lowered(torch.ops.lesson.laguerre, laguerre, promote="float"):
        _tried = check.attempt(_fifth, _x, shows=laguerre, name="laguerre", mode="fused", fresh=True)
    with_arguments = sheet.do(
        "2.4",
        _tried,
        title="an op with arguments",
        test=_test,
        par={"launches": 1, "misses": 1},
        right="The loop is gone.",
        why="It ran once, while the program was made. Another `n` would be another program: a miss.",
        todo="One expression is enough.",
        hints=(
            "solve the equation for Lₖ₊₁: what stands over `k + 1`?",
            "on the right of the equation, write `this` for Lₖ and `last` for Lₖ₋₁.",
            "mind the brackets: `2 * k + 1 - x` is one factor.",
        ),
    )
    with_arguments
    return (with_arguments,)


@app.cell(hide_code=True)
def _(for_nothing, lowering, where_cut, with_arguments):
    score = sheet.show(where_cut, lowering, for_nothing, with_arguments, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - An op without a lowering runs on the CPU: the program is cut there, and bytes go both ways.
    - A lowering is a few lines of jax. The forms with `out=` and the dtypes follow from PyTorch's schema.
    - Python's own loops and numbers are gone when the program runs.

    `tpu_lab.coverage(model, *inputs)` lists what your model would need. Next: `03_three_modes.py`.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
