# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Your model on a TPU"
# description = "Paste an nn.Module: will it run on TorchTPU, what does a step of it launch, what does a TPU's compiler join, and what to change. About 5 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="Your model on a TPU")

with app.setup:
    import marimo as mo

    import tpu_lab
    from tpu_lab.lessons import your_model as lesson
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import number, page


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Your model on a TPU

    **Will your model run on a TPU, what will it launch there, and what should you change?**

    Paste an `nn.Module` and say the shape of its input, or choose one of the examples. You see whether TorchTPU has
    every op that it needs, what one training step of it runs, and what a TPU's compiler makes of that.

    You need nothing but this page, no TPU either. About 5 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here: code and shape instead of the example's.
    params = {"device": "tpu", "chip": "v6e", "example": "convolutions", "code": None, "shape": None}
    return (params,)


@app.cell(hide_code=True)
def _(params):
    example = mo.ui.dropdown(list(lesson.examples()), value=params["example"])
    held = {}  # what was run last, and what was seen of it
    earlier = []  # the profiles of the last two models
    page.stack(mo.md("## The model"), page.panel(("an example to start from", example)))
    return earlier, example, held


@app.cell(hide_code=True)
def _(example, params):
    _code, _shape = lesson.examples()[example.value]
    _own = example.value == params["example"]
    offered = (
        params["code"] if _own and params["code"] is not None else _code,
        params["shape"] if _own and params["shape"] is not None else _shape,
    )
    code = mo.ui.code_editor(offered[0], language="python", min_height=120, debounce=True)
    shape = mo.ui.text(offered[1], debounce=True)
    go = mo.ui.run_button(label="Run this code")
    page.stack(
        code,
        page.panel(("shape of the input: 8, 3, 32, 32 or i64[8, 64]; of two: 4, 8; 4, 1", shape), ("", go)),
    )
    return code, go, offered, shape


@app.cell
def _(code, earlier, go, held, offered, params, shape):
    # Code that was edited runs when the button is pressed, and not before.
    asked = (code.value, shape.value)
    if asked == offered or go.value:
        held["asked"] = asked
    waits = asked != held["asked"]
    if held.get("of") != held["asked"]:
        with mo.status.spinner("Running it", remove_on_exit=True):
            held["seen"] = lesson.look(*held["asked"], params["device"])
        held["of"] = held["asked"]
        if held["seen"].profile is not None:
            earlier[:] = [*earlier[-1:], held["seen"].profile]
    seen = held["seen"]
    return seen, waits


@app.cell(hide_code=True)
def _(earlier, held, seen, waits):
    _waiting = "The code was edited: the button runs it, and below is what ran before" if waits else None
    _fresh = len(earlier) == 2 and earlier[1] is seen.profile
    page.stack(
        _waiting and page.heading(_waiting),
        page.stack(page.heading("It does not run yet"), page.code(seen.fault))
        if seen.fault
        else page.stack(
            page.heading(f"What changed: {earlier[0].diff(earlier[1]).title}") if _fresh else None,
            lesson.figures(seen),
            mo.md("## Will it run on TorchTPU?"),
            seen.coverage,
        ),
    )
    return


@app.cell(hide_code=True)
def _(seen):
    page.stack(
        mo.md("""
        ## What a step runs

        Every op of one training step in order, with the line that it comes from: forward, then backward, then the
        optimizer. A view is free, and the others wait until a value is needed.
        """),
        seen.profile.ops,
        mo.accordion(
            {
                "The whole report": seen.profile,
                **{f"Its {n}": seen.profile.view(n) for n in ("memory", "cache", "roofline")},
            }
        ),
    ) if seen.profile is not None else None
    return


@app.function
def ahead(params):
    """What lies beside this notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    made = {}
    for name, (code, shape) in lesson.examples().items():
        seen = lesson.look(code, shape, params["device"])
        made |= {f"{name}: {part}": shown for part, shown in lesson.on_chip(seen.profile, params["chip"]).items()}
    return made


@app.cell
def _(params):
    # Compiled ahead of time for the examples; the button does it for your code.
    stored = made_ahead.of("your_model")
    here = mo.ui.run_button(label=f"Compile this step for {params['chip']} here")
    return here, stored


@app.cell
def _(held, here, params, seen, stored):
    # Without libtpu there is no compiler for a TPU: then this says so, and what is stored stays.
    _name = next((name for name, pair in lesson.examples().items() if pair == held["asked"]), None)
    on_tpu, how, refused = None, "", ""
    if _name is not None:
        on_tpu = {part: stored[f"{_name}: {part}"] for part in ("groups", "memory", "try")}
        how = f"It is {stored.words}."
    if here.value and seen.profile is not None:
        try:
            held["on_tpu"] = seen, lesson.on_chip(seen.profile, params["chip"])
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    if held.get("on_tpu", (None,))[0] is seen:
        on_tpu, how = held["on_tpu"][1], "It is compiled here, from your code."
    return how, on_tpu, refused


@app.cell(hide_code=True)
def _(here, how, on_tpu, params, refused, seen):
    page.stack(
        mo.md(f"""
        ## What a TPU's compiler joins

        Ops of one **group** share a kernel: what passes between them is never written to memory. On the left of the
        source are the groups of this machine's compiler, on the right those of XLA for {params["chip"]}, where nothing
        runs here. {how or "The button compiles your code; until then there are the groups of this machine only."}
        """),
        here,
        page.code(refused) if refused else None,
        on_tpu["groups"] if on_tpu else seen.profile.fusions,
        mo.accordion({f"Memory and padding on {params['chip']}": on_tpu["memory"]}) if on_tpu else None,
    ) if seen.profile is not None else None
    return


@app.cell(hide_code=True)
def _(on_tpu, seen):
    page.stack(
        mo.md("## What to change"),
        page.table(
            [{"do": act, "because": why} for act, why in lesson.changes(seen, on_tpu and on_tpu["try"])],
            caption="What to change, and why",
        ),
        None if on_tpu else mo.md("What a tile wastes is known when it was compiled for the TPU: the button above."),
    ) if seen.profile is not None else None
    return


@app.cell(hide_code=True)
def _(on_tpu, params, seen):
    _m = None if seen.profile is None else seen.profile.metrics
    mo.md(
        "## What we saw\n\nThe code did not run, and the sentence above says why. No other view is shown of it."
        if _m is None
        else f"""
    ## What we saw

    - {seen.coverage.title}.
    - A training step is {number.plural(len(_m.ops_in(_m.span)), "op")} and
      {number.plural(len(_m.launches_in(_m.span)), "launch", "launches")} in fused mode.
    - {"The compiler for " + params["chip"] + " has seen it: " + on_tpu["memory"].title if on_tpu else "The compiler for " + params["chip"] + " has not seen it yet"}.

    Now try: the example with an op that TorchTPU lacks, and write the op with others that it has. Is the model still
    one launch?
    """
    )
    return


@app.cell
def _(held, seen):
    # What the text above claims, held.
    if seen.fault:
        assert "Traceback" not in seen.fault and "\n" not in seen.fault, "an error is one sentence"
    else:
        _m = seen.profile.metrics
        assert len(seen.coverage.rows) > 0, f"ops were counted for {held['asked'][1]}"
        assert {*seen.coverage.rows.torch_tpu} <= {"registered", "missing", "PyTorch’s"}
        assert _m.launches_in(_m.span), "the step ran on the device"
    return


if __name__ == "__main__":
    app.run()
