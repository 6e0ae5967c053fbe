# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "DLRM: why are embeddings slow?"
# description = "A recommendation model tells which flights will be late. Tables of names hold its parameters and move its bytes. About 10 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="DLRM: why are embeddings slow?")

with app.setup:
    import inspect
    from dataclasses import dataclass

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.lessons import dlrm as lesson
    from tpu_lab.lessons.dlrm import ahead  # noqa: F401  what is compiled ahead of time for the default settings
    from tpu_lab.lessons.runs import MODES, called, once
    from tpu_lab.models import data, dlrm
    from tpu_lab.targets import target
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import page

    AT_ONCE = ("script", None)  # where no button can be pressed: as a script, and outside marimo


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Why are embeddings slow?

    **A table of names costs almost no arithmetic: what does the machine do all the time?**

    A recommendation model looks names up in tables: users and films, or, here, carriers, aircraft and airports. You
    train one to tell which flights will be late, and see what its tables cost under the roofline.

    You need nothing but this page, no TPU either. About 10 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "batch": 512,
        "width": 32,
        "rows": 10_000,
        "joined": False,
        "steps": 16,
        "rate": 3e-3,
        "apart": 6,
        "longer": 400,
        "better": 0.03,
    }
    return (params,)


@app.cell
def _():
    # All of this is known before the flight leaves: the fourth measure, its delay at departure, is left out.
    flights = data.flights()
    late = flights["late"]
    measured = torch.cat([flights["dense"][:, :3], flights["weather"]], dim=1)
    names = [flights[name].view(len(late), -1) for name in dlrm.TABLES]
    return late, measured, names


@app.cell
def _(late, measured):
    baseline = lesson.logistic(measured, late)[-lesson.UNSEEN :]
    to_beat = dlrm.auc(baseline, late[-lesson.UNSEEN :])
    return baseline, to_beat


@app.cell(hide_code=True)
def _(late, to_beat):
    page.stack(
        mo.md("""
        ## The flights

        New York planned 336,776 flights in 2013. Here are those that arrived, with the weather at their departure; a
        fifth of them is held out. Which will be late? A **logistic regression** sees what is measured: distance, planned
        times, six figures of the weather. Its **AUC** says how often it ranks a late flight above one on time.
        """),
        page.facts(
            (f"{len(late):,}", "flights that arrived"),
            (f"{late.mean():.1%}", "over 15 minutes late"),
            (f"{sum(dlrm.TABLES.values()):,}", f"names in {len(dlrm.TABLES)} tables"),
            (f"{to_beat:.3f}", "AUC of the logistic regression: to beat"),
        ),
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(f"""
    ## The model

    Each name becomes a row of a table. What is measured goes through an MLP and becomes a vector of the same width.
    The dot products of all pairs say what goes with what; another MLP reads them. This is ordinary PyTorch, moved with
    `.to("tpu")`.

    ```python
{inspect.getsource(dlrm.Model.forward)}
    ```
    """)
    return


@app.function
def train(model, batches, rate):
    """The training loop of any PyTorch tutorial; it gives the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for late, measured, *names in batches:
        loss = dlrm.loss(model, late, measured, *names)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@app.class_definition
@dataclass(frozen=True)
class Run:
    """What one training gave."""

    losses: list[float]  # nats a flight, one a step
    model: torch.nn.Module
    profile: tpu_lab.Profile


@app.function
def run(chosen, steps, params, columns, title):
    """Train a new model for `steps` steps with the settings in `chosen`, watched by a profile."""
    config, size, mode = lesson.config_of(chosen), chosen["batch"], chosen["mode"]
    torch.manual_seed(0)
    model = dlrm.Model(config).to(params["device"])
    picks = torch.randint(len(columns[0]) - lesson.UNSEEN, (steps, size))
    batches = ([part.to(params["device"]) for part in lesson.pick(columns, some, config)] for some in picks)
    with tpu_lab.profile(
        name=f"DLRM d{config.width} B{size}{', one table' if config.joined else ''}",
        flops=dlrm.flops(config, size),
        mode="fused" if mode == "compile" else mode,  # the model is compiled, the optimizer around it is fused
    ) as profile:
        training = train(called(model, mode), batches, params["rate"])
        losses = list(mo.status.progress_bar(training, total=steps, title=title, remove_on_exit=True))
    return Run(losses, model, profile)


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    _tables = {"one for each kind of name": False, "one for all names": True}
    # Each by itself: of a mo.ui.dictionary that is moved twice while the model trains, marimo keeps the last move alone.
    mode = mo.ui.dropdown(MODES, value=params["mode"])
    batch, width = _slider("batch", [128, 256, 512, 1024, 2048, 4096]), _slider("width", [4, 8, 16, 32, 64, 128])
    rows = _slider("rows", [16, 64, 256, 1024, 10_000])
    joined = mo.ui.dropdown(_tables, value=list(_tables)[params["joined"]])
    earlier = []  # the profiles of the last two settings
    page.stack(
        mo.md("""
        ## Train a few steps, and look

        Change a control: a new model trains with it. With fewer rows than names, some names share a row.
        """),
        page.panel(
            ("eager mode", mode),
            ("batch, flights a step", batch),
            ("embedding width", width),
            ("rows a table has at most", rows),
            ("tables", joined),
        ),
    )
    return batch, earlier, joined, mode, rows, width


@app.cell
def _(batch, earlier, joined, late, measured, mode, names, params, rows, width):
    chosen = {"mode": mode.value, "batch": batch.value}
    chosen |= {"width": width.value, "rows": rows.value, "joined": joined.value}
    columns = (late, measured, *names)
    short = run(chosen, params["steps"], params, columns, "Training")
    earlier[:] = [*earlier[-1:], short.profile]
    return chosen, columns, short


@app.cell(hide_code=True)
def _(earlier, short):
    _changed = f"What changed: {earlier[0].diff(earlier[1]).title}" if len(earlier) == 2 else None
    page.stack(_changed and page.heading(_changed), short.profile.roofline)
    return


@app.cell(hide_code=True)
def _(short):
    _others = ("ops", "fusions", "cache", "memory")
    mo.accordion({"The whole report": short.profile, **{f"Its {name}": short.profile.view(name) for name in _others}})
    return


@app.cell
def _(short):
    split = lesson.parts(short.profile)
    shares = lesson.shares_of(split)
    return shares, split


@app.cell(hide_code=True)
def _(shares, short, split):
    _held = sum(table.weight.numel() for table in short.model.tables)
    page.stack(
        mo.md("""
        ## Where the bytes go

        A lookup reads a row and writes it: bytes, and **no matmul**. Its gradient is as large as the whole table,
        though a batch touches few of its rows, and the optimizer reads and writes every row of it, with its two moments.
        The matmuls do nearly all the arithmetic.
        """),
        lesson.bytes_table(split),
        page.facts(
            (f"{_held / sum(p.numel() for p in short.model.parameters()):.1%}", "of the parameters are in tables"),
            (
                f"{shares[lesson.LOOKUPS][1] + shares[lesson.OPTIMIZER][1]:.0%}",
                "of the bytes move for them: lookups and optimizer",
            ),
        ),
    )
    return


@app.cell(hide_code=True)
def _():
    apart = mo.ui.run_button(label="Measure each op by itself")
    page.stack(
        mo.md("""
        ## Each op under its roof

        In fused mode a step is one launch, and nobody saw the single op. In **strict** mode each op is a launch, so
        each has a time. The first time, each op and shape is a program that is compiled for it.
        """),
        apart,
    )
    return (apart,)


@app.cell
def _(apart, chosen, columns, params):
    strict = None
    if apart.value or mo.app_meta().mode in AT_ONCE:
        strict = run({**chosen, "mode": "strict"}, params["apart"], params, columns, "Training op by op")
    return (strict,)


@app.cell(hide_code=True)
def _(strict):
    lesson.under_roofs(strict.profile) if strict else None
    return


@app.cell
def _(params):
    # Compiled ahead of time for the default settings; the button does it for yours.
    stored = made_ahead.of("dlrm")
    here = mo.ui.run_button(label=f"Compile this step for {params['chip']} here")
    return here, stored


@app.cell
def _(chosen, here, short, stored, params):
    # Without libtpu there is no compiler for a TPU: then this says so, and what is stored stays.
    on_tpu, figures, how, refused = stored["view"], stored["figures"], stored.words_at_first, ""
    sizes = lesson.sizes(stored.params)
    if here.value:
        try:
            _compiled = short.profile.on(params["chip"])
            on_tpu, how = _compiled.view, "compiled now, for the settings above"
            figures, sizes = [lesson.figure(_compiled, chosen["joined"])], lesson.sizes(chosen)
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    return figures, how, on_tpu, refused, sizes


@app.cell(hide_code=True)
def _(figures, here, how, on_tpu, params, refused, sizes):
    _chip = target(params["chip"])
    page.stack(
        mo.md(f"""
        ## The same step on a TPU {params["chip"]}

        Its ridge lies at {_chip.flops / _chip.bandwidth:.0f} FLOP per byte: tables wait for memory all the more. With
        **one table for all names** the compiler makes fewer gathers and scatters. And what is looked up lies in tiles of
        128 values: of a narrower row the rest is padding. Nothing runs on a TPU here: it is {how}.
        """),
        here,
        page.code(refused) if refused else None,
        page.table(
            [
                dict(zip((f"tables, {sizes}", "gathers", "scatters", "HBM takes", "arithmetic takes"), row))
                for row in figures
            ],
            caption="The step on the TPU, with seven tables and with one",
        ),
        on_tpu,
    )
    return


@app.cell(hide_code=True)
def _(params):
    more = mo.ui.run_button(label=f"Train a new model for {params['longer']} steps")
    trained = {}  # what was trained last, by its settings
    page.stack(mo.md("## Will it be late?\n\nWith the controls above, in fused mode."), more)
    return more, trained


@app.cell
def _(chosen, columns, late, more, params, trained):
    longer, scores, reached = None, None, None
    if more.value or mo.app_meta().mode in AT_ONCE:
        _said = f"Training {params['longer']} steps"
        _chosen = {**chosen, "mode": "fused"}
        longer = once(trained, (run, f"{_chosen}"), lambda: run(_chosen, params["longer"], params, columns, _said))
        scores = lesson.judge(longer.model, columns, params["device"])
        reached = dlrm.auc(scores, late[-lesson.UNSEEN :])
    return longer, reached, scores


@app.cell(hide_code=True)
def _(baseline, late, longer, scores):
    lesson.judged(scores, baseline, late[-lesson.UNSEEN :], longer.losses) if longer else None
    return


@app.cell(hide_code=True)
def _(reached, shares, strict, to_beat):
    _told = f"It ranks late flights with an AUC of {reached:.3f}." if reached else "The button trains it."
    mo.md(f"""
    ## What we saw

    - Lookups, their gradients and the optimizer move {shares[lesson.LOOKUPS][1] + shares[lesson.OPTIMIZER][1]:.0%} of a step's bytes
      and do none of its matmuls. {lesson.roof_words(strict and strict.profile)}
    - One table for all names gives the same model with fewer lookups.
    - {_told} A logistic regression that sees no names has {to_beat:.3f}.

    Now try: 16 rows a table (which bytes are gone, what does the AUC lose?), or a batch of 4096: who moves most now?
    """)
    return


@app.cell
def _(chosen, params, reached, short, split, stored, to_beat):
    # What the text above claims, held; what it learns, for what the controls start with.
    _at_first = all(params[name] == value for name, value in chosen.items())
    assert len(short.losses) == params["steps"] and short.profile.trace.launches, "the steps ran on the device"
    assert split[lesson.LOOKUPS][0] == 0 < split[lesson.LOOKUPS][1], "a lookup moves bytes and multiplies nothing"
    _gathers = [gathers for _, gathers, *_ in stored["figures"]]
    assert _gathers[0] > _gathers[1], "one table needs fewer gathers"
    assert reached is None or not _at_first or reached > to_beat + params["better"], "names help"
    return


if __name__ == "__main__":
    app.run()
