# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "minGPT: which mode, and what MFU?"
# description = "A small GPT learns Python on this machine. What a step costs in each mode, how MFU grows with the sequence, and a cache that compiles once. About 15 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="minGPT: which mode, and what MFU?")

with app.setup:
    import inspect
    from dataclasses import dataclass, replace

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.lessons import mingpt as lesson
    from tpu_lab.lessons.mingpt import ahead  # noqa: F401  what is compiled ahead of time for the default settings
    from tpu_lab.lessons.runs import MODES, called, eager, once, programs
    from tpu_lab.models import data, decode, mingpt
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import page

    START = "def "  # what the model continues


@app.cell(hide_code=True)
def _():
    mo.md("""
    # minGPT on the TPU device

    **Which mode, and what MFU as the sequence grows?**

    A small GPT reads Python source code and learns to write the next character. You change a control, it trains
    again, and the report beside the loss tells what ran: ops, launches, compilations, time. Then you lengthen the
    sequence, and at last you let it write without compiling at every word.

    You need nothing but this page. No TPU is needed: without one, the same programs are compiled for this computer's
    own processor. About 15 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "dtype": "float32",
        "batch": 8,
        "block": 64,
        "layers": 2,
        "width": 64,
        "rate": 3e-3,
        "steps": 60,
        "longer": 600,
        "reach": 2.3,
        "letters": 400,
        "lengths": [16, 32, 64, 128, 256],
        "read": 12,
        "places": 64,
    }
    return (params,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## The text

    The text is already on your machine: the sources of Python's own standard library. A model that knows only *how
    often* each character occurs cannot be better than the text's entropy. One that also sees the character before
    can do better. These two numbers, counted from the text itself, are what the model must beat.
    """)
    return


@app.cell
def _():
    ids = data.tokens()
    guess = torch.tensor(float(len(data.VOCABULARY))).log().item()  # every character equally likely
    alone = data.entropy(ids)  # how often each occurs
    paired = data.entropy(ids, order=2)  # and which one came before
    return alone, guess, ids, paired


@app.cell(hide_code=True)
def _(alone, guess, ids, paired):
    _start = data.text().index("def ")
    page.stack(
        page.facts(
            (f"{len(ids):,}", "characters of Python"),
            (f"{guess:.2f} nats", f"guessing among {len(data.VOCABULARY)}"),
            (f"{alone:.2f} nats", "knowing how often each occurs"),
            (f"{paired:.2f} nats", "and the one before it"),
        ),
        page.code(data.text()[_start : _start + 360]),
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## The training step

    This is ordinary PyTorch: the model is a plain `nn.Module`, and nothing in the loop knows a TPU. The model and the
    batches were moved with `.to("tpu")`, and that is all.
    """)
    return


@app.function
def train(model, batches, rate, dtype="float32"):
    """The training loop of any PyTorch tutorial; it gives the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for ids, following in batches:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = mingpt.loss(model, ids, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@app.cell(hide_code=True)
def _():
    # As an app the page hides its code; these lines are worth seeing.
    mo.md(f"```python\n{inspect.getsource(train)}\n```") if mo.app_meta().mode == "run" else None
    return


@app.class_definition
@dataclass(frozen=True)
class Run:
    """What one training gave."""

    losses: list[float]  # nats a character, one a step
    held_out: float  # the same on text that it never saw
    model: torch.nn.Module
    profile: tpu_lab.Profile


@app.function
def run(config, chosen, steps, device, title):
    """Train a new model for `steps` steps in one of four modes, watched by a profile."""
    torch.manual_seed(0)
    model = mingpt.Model(config).to(device)
    batches = [[part.to(device) for part in mingpt.batch(config, chosen["batch"], seed)] for seed in range(steps)]
    with tpu_lab.profile(**lesson.about(config, chosen)) as profile:
        training = train(called(model, chosen["mode"]), batches, chosen["rate"], chosen["dtype"])
        losses = list(mo.status.progress_bar(training, total=steps, title=title, remove_on_exit=True))
    # What it learned, on text that it never saw: one program, whatever the mode above.
    with eager("fused"), torch.no_grad():
        held_out = mingpt.loss(model, *(part.to(device) for part in mingpt.batch(config, 64, held_out=True))).item()
    return Run(losses, held_out, model, profile)


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    # Each by itself: of a mo.ui.dictionary that is moved twice while the model trains, marimo keeps the last move alone.
    mode = mo.ui.dropdown(MODES, value=params["mode"])
    dtype = mo.ui.dropdown(["float32", "bfloat16"], value=params["dtype"])
    batch, block = _slider("batch", [4, 8, 16, 32]), _slider("block", [16, 32, 64, 128])
    layers, width = _slider("layers", [1, 2, 3, 4, 6]), _slider("width", [32, 64, 96, 128, 192])
    rate, steps = _slider("rate", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]), _slider("steps", [20, 40, 60, 100, 200])
    earlier = []  # the profiles of the last two settings
    page.stack(
        mo.md("""
        ## Train, and look

        Change a control: the model trains from the start again. Try this first: **fused**, then **strict**, and compare
        the launches.
        """),
        page.panel(
            ("eager mode", mode),
            ("multiplied in", dtype),
            ("batch, texts a step", batch),
            ("block, characters seen", block),
            ("layers", layers),
            ("width", width),
            ("learning rate", rate),
            ("steps", steps),
        ),
    )
    return batch, block, dtype, earlier, layers, mode, rate, steps, width


@app.cell
def _(batch, block, dtype, earlier, layers, mode, params, rate, steps, width):
    chosen = {"mode": mode.value, "dtype": dtype.value, "batch": batch.value, "rate": rate.value}
    config = mingpt.Config(layers=layers.value, width=width.value, block=block.value, heads=4)
    short = run(config, chosen, steps.value, params["device"], f"Training in {mode.value} mode")
    earlier[:] = [*earlier[-1:], short.profile]
    return chosen, config, short


@app.cell(hide_code=True)
def _(alone, earlier, guess, paired, short):
    _changed = f"What changed: {earlier[0].diff(earlier[1]).title}" if len(earlier) == 2 else None
    _seconds = short.profile.metrics.wall_ns / 1e9
    _figures = page.facts(
        (f"{short.held_out:.2f} nats", "on text it never saw"),
        (f"{_seconds:.1f} s", f"for {len(short.losses)} steps, with compiling"),
    )
    _learned = page.stack(lesson.loss_curve(short.losses, guess, alone, paired), _figures)
    page.stack(_changed and page.heading(_changed), page.beside(_learned, short.profile))
    return


@app.cell(hide_code=True)
def _(short):
    _others = ("ops", "fusions", "cache", "memory", "roofline")
    mo.accordion({"All views of this run": mo.ui.tabs({name: short.profile.view(name) for name in _others})})
    return


@app.cell
def _(params):
    # Compiled ahead of time for the default settings; the button does it for yours.
    stored = made_ahead.of("mingpt")
    measure = mo.ui.run_button(label="Measure these lengths here")
    now = mo.ui.run_button(label=f"Compile this step for {params['chip']} here")
    return measure, now, stored


@app.cell
def _(chosen, config, measure, params):
    here = []
    if measure.value or mo.app_meta().mode == "script":
        for _length in mo.status.progress_bar(params["lengths"], title="Measuring", remove_on_exit=True):
            here.append((_length, lesson.mfu(replace(config, block=_length), chosen, params["device"])))
    return (here,)


@app.cell
def _(chosen, config, now, params, short, stored):
    # Without libtpu there is no compiler for a TPU: then this says so, and what is stored stays.
    view, how, yours, refused = stored["view"], stored.words_at_first, None, ""
    if now.value:
        try:
            _compiled = short.profile.on(params["chip"])
            view, how = _compiled.view, "compiled now, for the settings above"
            yours = lesson.at_most(config, chosen["batch"], _compiled)
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    return how, refused, view, yours


@app.cell(hide_code=True)
def _(chosen, here, how, measure, now, params, refused, stored, view, yours):
    _how_much = f"With your settings {params['chip']} can use {yours:.0%} of its peak." if yours else None
    page.stack(
        mo.md(f"""
        ## A longer sequence

        **MFU** is the share of the chip's arithmetic that the model needs: model FLOPs over time and peak. However short
        the text, a step reads and writes every weight, its gradient and the optimizer's two moments. A longer text
        does more arithmetic with the same bytes: MFU grows until the arithmetic itself is what takes the time.

        For a TPU {params["chip"]} the line is a bound, from what its compiler made: it is {how}. Here the same step is
        timed, without the optimizer, in the mode above.
        """),
        page.panel(("this computer", measure), (f"TPU {params['chip']}", now)),
        page.code(refused) if refused else None,
        lesson.mfu_curve(params["chip"], stored["mfu"], here, lesson.sizes(stored.params)),
        _how_much,
        mo.accordion(
            {f"This step on a TPU {params['chip']}: does it fit, where its bytes are, what padding costs": view}
        ),
    )
    return


@app.cell(hide_code=True)
def _(params):
    more = mo.ui.run_button(label=f"Train a new model for {params['longer']} steps")
    trained = {}  # what was trained last, by its settings
    _prose = mo.md("""
    ## Let it write

    A few dozen steps teach it which letters are common. Ten times as many teach it words. The button trains with the
    controls above; in strict mode that takes longest.
    """)
    page.stack(_prose, more)
    return more, trained


@app.cell
def _(chosen, config, more, params, short, trained):
    longer = short
    if more.value or mo.app_meta().mode == "script":
        _steps = params["longer"]
        _made = lambda: run(config, chosen, _steps, params["device"], f"Training {_steps} steps")  # noqa: E731
        longer = once(trained, (run, f"{config} {chosen}"), _made)
    return (longer,)


@app.cell
def _(longer, params):
    # One launch a character: every step runs the same shape, so it is compiled once.
    with eager("fused"):
        _made = longer.model.generate(data.encode(START)[None], params["letters"], temperature=0.7, top_k=20)
    sample = data.decode(_made)
    return (sample,)


@app.cell(hide_code=True)
def _(alone, guess, longer, paired, sample, short):
    _said = (
        f"After {len(longer.losses)} steps, {longer.held_out:.2f} nats on text it never saw, it writes from `def ` on:"
    )
    _curve = lesson.loss_curve(longer.losses, guess, alone, paired) if longer is not short else None
    page.beside(page.stack(mo.md(_said), page.code(sample)), _curve or "", widths=(480, 480))
    return


@app.cell(hide_code=True)
def _(params):
    write_both = mo.ui.run_button(label=f"Let it read {params['read']} characters with either cache")
    _sizes = sorted({4, 8, 16, 32, 64, params["places"]})
    places = mo.ui.slider(steps=_sizes, value=params["places"], debounce=True, show_value=True)
    page.stack(
        mo.md("""
        ## Read each character once

        So far each new character made the model read the whole block again. A **cache** keeps the keys and values of
        what was read. One that is as long as the text has another shape at each character, and each shape is a
        program. One with **places ready** is filled in place and masked, and its shape stays.
        """),
        page.panel(
            ("places the cache gets at a time", places), ("a program a character: this takes a while", write_both)
        ),
    )
    return places, write_both


@app.function
def write(model, cache, count, name):
    """Read `count` characters, its own in the end, from an empty memory of programs as after a start: (profile, text)."""
    ids = data.encode(START)[None]
    torch.tpu.synchronize()
    torch.tpu._clear_cache()
    with tpu_lab.profile(mode="fused", name=name) as profile:
        ids = decode.generate(model, cache, ids, count - ids.shape[1] + 1, temperature=0)
    return profile, data.decode(ids)


@app.cell
def _(longer, params, places, write_both):
    growing = static = None
    if write_both.value or mo.app_meta().mode == "script":
        growing = write(longer.model, decode.Growing(longer.model), params["read"], "a cache as long as the text")
        static = write(longer.model, decode.Static(longer.model, places.value), params["read"], "a cache with places")
    return growing, static


@app.cell(hide_code=True)
def _(growing, places, static):
    lesson.caches(growing[0], static[0], places.value) if static else None
    return


@app.cell(hide_code=True)
def _(growing, longer, paired, params, static, stored):
    _launches, _ops = len(longer.profile.trace.launches), len(longer.profile.trace.ops)
    _better = "better" if longer.held_out < paired else "not yet better"
    _cached = (
        f"{programs(growing[0])} programs with a cache that grows, {programs(static[0])} with places ready"
        if static
        else "a cache that grows needs a program for each character, one with places ready a single one"
    )
    (_first, _low), *_, (_last, _high) = stored["mfu"]
    mo.md(f"""
    ## What we saw

    - The loss fell from {longer.losses[0]:.2f} to {longer.losses[-1]:.2f} nats a character, and is
      {longer.held_out:.2f} on text that the model never saw: {_better} than the {paired:.2f} of who sees one character.
    - {_ops:,} ops ran as {_launches:,} launches. The mode changes the launches and the time; the losses stay.
    - A longer sequence uses the weights more often: with {lesson.sizes(stored.params)} at most {_low:.0%} of a
      {params["chip"]} at {_first} characters, {_high:.0%} at {_last}.
    - To write with a cache: {_cached}.

    Now try: twice the batch (does a step take twice as long?), `compile`, bfloat16, or the smallest width, where nearly
    all the time is not spent on the device.
    """)
    return


@app.cell
def _(chosen, config, growing, guess, longer, params, places, short, static, stored):
    # What the text above claims, held; what it learns, for what the controls start with.
    _at_first = chosen | {"block": config.block, "layers": config.layers, "width": config.width}
    _at_first = all(params[name] == value for name, value in _at_first.items())
    assert abs(longer.losses[0] - guess) < 0.3, "an untrained model guesses"
    assert longer.losses[-1] < longer.losses[0] or not _at_first, "it learned"
    assert short.profile.trace.launches, "the steps ran on the device"
    _shares = [share for _, share in stored["mfu"]]
    assert _shares == sorted(_shares) and 0 < _shares[0] < _shares[-1] < 1, "MFU grows with the sequence"
    if longer is not short and _at_first:
        assert longer.held_out < params["reach"], "as good as stated"
    if static:
        assert growing[1] == static[1], "both caches write the same"
        assert programs(growing[0]) == len(growing[0].trace.launches) == params["read"], "each shape is a program"
        assert programs(static[0]) == 1 or places.value < params["read"], "one shape is one program"
    return


if __name__ == "__main__":
    app.run()
