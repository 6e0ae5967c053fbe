# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "minGPT on the TPU device"
# description = "A small GPT learns Python on this machine. What one training step costs, and what the eager mode saves. About 10 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="minGPT on the TPU device")

with app.setup:
    import inspect
    import time
    from dataclasses import dataclass

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.models import data, mingpt
    from tpu_lab.viz import page


@app.cell(hide_code=True)
def _():
    mo.md("""
    # minGPT on the TPU device

    **What does one training step of a language model cost, and how much of it can the eager mode save?**

    A small GPT reads Python source code and learns to write the next character. You change a control, it trains
    again, and the report beside the loss tells what ran: ops, launches, compilations, time.

    You need nothing but this page. No TPU is needed: without one, the same programs are compiled for this computer's
    own processor. About 10 minutes.
    """)
    return


@app.function(hide_code=True)
def loss_curve(losses, guess, alone, paired):
    """The loss over the steps, against what simpler models reach."""
    return page.curve(
        losses,
        f"{losses[-1]:.2f} nats a character after {len(losses)} steps, {losses[0]:.2f} at first",
        y="loss, nats a character",
        levels=[(guess, "guessing"), (alone, "how often each"), (paired, "and the one before")],
    )


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "mode": "fused",
        "batch": 8,
        "block": 64,
        "layers": 2,
        "width": 64,
        "rate": 3e-3,
        "steps": 60,
        "longer": 600,
        "letters": 400,
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
def train(model, batches, rate):
    """The training loop of any PyTorch tutorial; it gives the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for ids, following in batches:
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
    seconds: float
    model: torch.nn.Module
    profile: tpu_lab.Profile


@app.function
def run(config, mode, batch, rate, steps, device, title):
    """Train a new model for `steps` steps in one of four modes, watched by a profile."""
    torch.manual_seed(0)
    model = mingpt.Model(config).to(device)
    called = torch.compile(model) if mode == "compile" else model
    batches = [[part.to(device) for part in mingpt.batch(config, batch, seed)] for seed in range(steps)]
    start = time.perf_counter()
    with tpu_lab.profile(
        name=f"minGPT d{config.width} L{config.layers} B{batch} T{config.block}",
        flops=mingpt.flops(config, batch),
        mode="fused" if mode == "compile" else mode,  # the model is compiled, the optimizer around it is fused
    ) as profile:
        losses = list(
            mo.status.progress_bar(train(called, batches, rate), total=steps, title=title, remove_on_exit=True)
        )
    seconds = time.perf_counter() - start
    # What it learned, on text that it never saw: one program, whatever the mode above.
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE), torch.no_grad():
        unseen = [part.to(device) for part in mingpt.batch(config, 64, held_out=True)]
        held_out = mingpt.loss(model, *unseen).item()
    return Run(losses, held_out, seconds, model, profile)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Train, and look

    Change a control: the model trains from the start again. Try this first: **fused**, then **strict**, and compare
    the launches.
    """)
    return


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    _mode = mo.ui.dropdown(["strict", "debug", "fused", "compile"], value=params["mode"])
    _named = {
        "mode": ("eager mode", _mode),
        "batch": ("batch, texts a step", _slider("batch", [4, 8, 16, 32])),
        "block": ("block, characters seen", _slider("block", [16, 32, 64, 128])),
        "layers": ("layers", _slider("layers", [1, 2, 3, 4, 6])),
        "width": ("width", _slider("width", [32, 64, 96, 128, 192])),
        "rate": ("learning rate", _slider("rate", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2])),
        "steps": ("steps", _slider("steps", [20, 40, 60, 100, 200])),
    }
    controls = mo.ui.dictionary({name: control for name, (_, control) in _named.items()})
    page.panel(*((label, controls[name]) for name, (label, _) in _named.items()))
    return (controls,)


@app.cell
def _(controls, params):
    chosen = dict(controls.value)
    config = mingpt.Config(layers=chosen["layers"], width=chosen["width"], block=chosen["block"], heads=4)
    _said = f"Training in {chosen['mode']} mode"
    short = run(config, chosen["mode"], chosen["batch"], chosen["rate"], chosen["steps"], params["device"], _said)
    return chosen, config, short


@app.cell(hide_code=True)
def _(alone, chosen, guess, paired, short):
    _rate = chosen["batch"] * chosen["block"] * len(short.losses) / short.seconds
    _figures = page.facts(
        (f"{short.held_out:.2f} nats", "on text it never saw"),
        (f"{short.seconds:.1f} s", f"for {len(short.losses)} steps, with compiling"),
        (f"{_rate:,.0f}", "characters a second"),
    )
    page.beside(page.stack(loss_curve(short.losses, guess, alone, paired), _figures), short.profile)
    return


@app.cell(hide_code=True)
def _(params):
    more = mo.ui.run_button(label=f"Train a new model for {params['longer']} steps")
    _prose = mo.md("""
    ## Let it write

    A few dozen steps teach it which letters are common. Ten times as many teach it words. The button trains with the
    controls above; in strict mode that takes longest.
    """)
    page.stack(_prose, more)
    return (more,)


@app.cell
def _(chosen, config, more, params, short):
    longer = short
    if more.value:
        _said = f"Training {params['longer']} steps"
        longer = run(config, chosen["mode"], chosen["batch"], chosen["rate"], params["longer"], params["device"], _said)
    return (longer,)


@app.cell
def _(chosen, longer, params):
    # One launch a character: every step runs the same shape, so it is compiled once.
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        _made = longer.model.generate(data.encode("def ")[None], params["letters"], temperature=0.7, top_k=20)
    sample = data.decode(_made)
    return (sample,)


@app.cell(hide_code=True)
def _(alone, guess, longer, paired, sample, short):
    page.stack(
        mo.md(f"After {len(longer.losses)} steps it writes, from `def ` on:"),
        page.code(sample),
        loss_curve(longer.losses, guess, alone, paired) if longer is not short else None,
    )
    return


@app.cell(hide_code=True)
def _(alone, guess, longer):
    _launches, _ops = len(longer.profile.trace.launches), len(longer.profile.trace.ops)
    mo.md(f"""
    ## What we saw

    - The loss fell from {longer.losses[0]:.2f} to {longer.losses[-1]:.2f} nats a character, and is
      {longer.held_out:.2f} on text that the model never saw.
    - {_ops:,} ops ran as {_launches:,} launches. The mode changes the launches and the time; the losses stay.
    - A program is compiled once for each new shape and then found again: only the first steps wait for the compiler.

    Now try: twice the batch (does a step take twice as long?), `compile`, or the smallest width, where nearly all the
    time is not spent on the device.
    """)
    return


@app.cell
def _(alone, guess, longer, short):
    # What the text above claims, held.
    assert abs(longer.losses[0] - guess) < 0.3, "an untrained model guesses"
    assert longer.losses[-1] < longer.losses[0], "it learned"
    assert short.profile.trace.launches, "the steps ran on the device"
    return


if __name__ == "__main__":
    app.run()
