# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "ResNet: where do fusions end?"
# description = "A residual network reads handwritten digits. Which ops a compiler joins, why it stops, and what a TPU's tile wastes. About 10 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="ResNet: where do fusions end?")

with app.setup:
    import inspect
    import textwrap

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.lessons import resnet as lesson
    from tpu_lab.lessons.resnet import ahead  # noqa: F401  what is compiled ahead of time for the default settings
    from tpu_lab.lessons.runs import called, eager, once
    from tpu_lab.models import data, resnet
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import page

    SPLIT = 4000  # digits to learn from; the other 1,000 are for the test


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Where do fusions end?

    **A compiler joins ops so that what one writes the next need not read from memory: where must it stop?**

    A residual network learns to read handwritten digits. Its pattern is always the same: convolution, norm, relu.
    You see which of them share a kernel on this machine and on a TPU v6e, and what a TPU's tile wastes.

    You need nothing but this page, no TPU either. About 10 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "chip": "v6e",
        "channels": 8,
        "batch": 32,
        "steps": 8,
        "epochs": 8,
        "rate": 1e-2,
        "accuracy": 0.96,
    }
    return (params,)


@app.cell
def _():
    images, labels = data.digits()
    x = (images - images.mean()) / images.std()
    return images, labels, x


@app.cell(hide_code=True)
def _(images, labels):
    page.stack(
        mo.md("## The digits"),
        page.facts(
            (f"{SPLIT:,}", "digits to learn from"), (f"{len(images) - SPLIT:,}", "to test"), ("28 × 28", "pixels")
        ),
        page.pictures([(1 - image, f"{label}") for image, label in zip(images[:12], labels[:12].tolist())], width=56),
    )
    return


@app.cell(hide_code=True)
def _():
    page.stack(
        mo.md("""
        ## The block

        This is all of it that matters here: convolutions, each with its norm, and a way around.
        """),
        page.code(textwrap.dedent(inspect.getsource(resnet.Block.forward))),
        mo.md("""
        A **norm** needs the mean over the whole batch, so no pixel can be normalised before every pixel is there. A
        **relu** needs only its own pixel. Which of the three can share a kernel?
        """),
    )
    return


@app.function
def train(model, optimizer, schedule, batches):
    """The training loop of any PyTorch tutorial; it gives the loss of each step."""
    for digits, truth in batches:
        loss = resnet.loss(model, digits, truth)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


@app.function
def run(channels, batch, steps, rate, device, x, labels, title, mode="fused"):
    """Train a new model: (model, the loss of each step). Each digit is shifted by up to a pixel, anew each time."""
    torch.manual_seed(0)
    model = resnet.Model(resnet.Config(width=channels)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, cycle_momentum=False)
    order = torch.cat([torch.randperm(SPLIT) for _ in range(steps * batch // SPLIT + 1)])
    seen = ((resnet.shifted(x[chosen]), labels[chosen]) for chosen in order.split(batch)[:steps])
    batches = ([part.to(device) for part in pair] for pair in seen)
    with eager(mode):
        losses = mo.status.progress_bar(
            train(called(model, mode), optimizer, schedule, batches), total=steps, title=title, remove_on_exit=True
        )
        return model, list(losses)


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    channels, batch = _slider("channels", [4, 8, 16, 32]), _slider("batch", [8, 16, 32, 64, 128])
    earlier = []  # the profiles of the last two settings
    page.stack(
        mo.md("## Train a few steps, and look"),
        page.panel(("channels of the first stage", channels), ("batch, digits a step", batch)),
    )
    return batch, channels, earlier


@app.cell
def _(batch, channels, earlier, labels, params, x):
    with tpu_lab.profile(
        name=f"ResNet C{channels.value} B{batch.value}",
        flops=resnet.flops(resnet.Config(width=channels.value), batch.value),
        mode="fused",
    ) as profile:
        model, first_losses = run(
            channels.value, batch.value, params["steps"], params["rate"], params["device"], x, labels, "Training"
        )
    earlier[:] = [*earlier[-1:], profile]
    return first_losses, model, profile


@app.cell(hide_code=True)
def _(earlier, profile):
    _changed = page.heading(f"What changed: {earlier[0].diff(profile).title}") if len(earlier) == 2 else None
    page.stack(_changed, profile.fusions)
    return


@app.cell(hide_code=True)
def _(profile):
    mo.accordion({"The whole report: time, every op, cache, memory, roofline": profile})
    return


@app.cell
def _(params):
    # Compiled ahead of time for the default settings; the button below does it for yours.
    stored = made_ahead.of("resnet")
    now = mo.ui.run_button(label=f"Compile this step for {params['chip']} here")
    return now, stored


@app.cell
def _(batch, channels, now, params, profile, stored):
    # Without libtpu there is no compiler for a TPU: then this says so, and what is stored stays.
    groups, memory, how, refused = stored["groups"], stored["memory"], stored.words_at_first, ""
    both = f"C{stored.params['channels']} B{stored.params['batch']}"  # what CPU and TPU are compared for
    if now.value:
        try:
            _compiled = profile.on(params["chip"])
            groups, memory, how = _compiled.fusions, _compiled.view, "compiled now, for the settings above"
            both = f"C{channels.value} B{batch.value}"
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    return both, groups, how, memory, refused


@app.cell(hide_code=True)
def _(both, groups, how, now, params, refused):
    _cpu, _tpu = lesson.sides(groups.rows)
    page.stack(
        mo.md(f"""
        ## The same step on a TPU {params["chip"]}

        XLA has another compiler for a TPU. It can put a norm's sums and a relu *into* the convolution's kernel, where
        the value is still at hand. Nothing runs on a TPU here: it is {how}.
        """),
        now,
        page.code(refused) if refused else None,
        lesson.ends_table(_cpu, _tpu, params["chip"], both),
        page.facts(
            (
                "{} of {}".format(*lesson.with_company(_cpu)),
                f"convolution kernels also hold a norm or relu: CPU, {both}",
            ),
            ("{} of {}".format(*lesson.with_company(_tpu)), f"the same on {params['chip']}, {both}"),
        ),
    )
    return


@app.cell(hide_code=True)
def _(both, groups, memory, params, stored):
    _batches = [row["batch"] for row in stored["padding"]]
    _factors = [row["held"] / row["useful"] for row in stored["padding"]]
    page.stack(
        mo.md("""
        ## What the tile wastes

        A TPU keeps arrays in tiles of 8 × 128 values. For this network the compiler puts the **batch** along the 128
        and the **channels** along the 8: a batch of 32 leaves three quarters of every tile empty.
        """),
        page.beside(
            page.curve(
                _factors,
                f"A batch of {_batches[0]} holds {_factors[0]:.1f} times its bytes, one of {_batches[-1]} {_factors[-1]:.1f} times",
                x="batch",
                y="bytes held for each useful one",
                levels=[(1, "no waste")],
                at=_batches,
            ),
            mo.ui.tabs(
                {f"Memory and padding on {params['chip']}, {both}": memory, f"Groups on the source, {both}": groups}
            ),
        ),
    )
    return


@app.cell(hide_code=True)
def _(params):
    longer = mo.ui.run_button(label=f"Train {params['epochs']} times over the digits")
    trained = {}  # what was trained last, by its settings
    page.stack(mo.md("## Let it learn\n\nWith the controls above; wide networks take longest."), longer)
    return longer, trained


@app.cell
def _(batch, channels, labels, longer, params, trained, x):
    losses, seen = [], None
    if longer.value or mo.app_meta().mode == "script":
        _steps = max(4, params["epochs"] * SPLIT // batch.value)
        _chosen = (channels.value, batch.value, _steps, params["rate"], params["device"])
        _trained, losses = once(
            trained, (run, *_chosen), lambda: run(*_chosen, x, labels, f"Training {_chosen[2]} steps")
        )
        seen = lesson.read(_trained, x[SPLIT:], params["device"])
    accuracy = None if seen is None else (seen == labels[SPLIT:]).float().mean().item()
    return accuracy, losses, seen


@app.cell(hide_code=True)
def _(accuracy, images, labels, losses, seen):
    _wrong = [] if seen is None else (seen != labels[SPLIT:]).nonzero().flatten().tolist()
    _missed = [(1 - images[SPLIT + i], f"{labels[SPLIT + i]}, read {seen[i]}") for i in _wrong[:21]]
    page.beside(
        page.curve(losses, f"{accuracy:.1%} of the {len(seen):,} digits it never saw are read right", y="loss, nats"),
        page.stack(page.heading(f"{len(_wrong)} it got wrong"), page.pictures(_missed, width=72)),
        widths=(420, 520),
    ) if seen is not None else None
    return


@app.cell(hide_code=True)
def _(accuracy, both, groups, params, profile):
    _cpu, _tpu = lesson.sides(groups.rows)
    _groups = (profile.fusions.rows.ops.str.len() > 0).sum()
    _read = f"It reads {accuracy:.1%} of the test digits right." if accuracy else "The button trains it to 96%."
    mo.md(f"""
    ## What we saw

    - {len(profile.metrics.ops_in(profile.metrics.span))} ops of a step run as {_groups} groups on this machine.
      Groups end where a value must be complete or is read in several places; relu and norm's last step join freely.
    - With {both}, {lesson.with_company(_cpu)[0]} of {lesson.with_company(_cpu)[1]} convolution kernels hold a norm or relu as well
      on a CPU, and {lesson.with_company(_tpu)[0]} of {lesson.with_company(_tpu)[1]} on {params["chip"]}.
    - On {params["chip"]} the batch fills the tile's 128 lanes: a small batch wastes most of it.
    - {_read}

    Now try: a batch of 128, then compile for the TPU again. Which bytes are gone?
    """)
    return


@app.cell
def _(accuracy, batch, channels, first_losses, groups, params, profile, stored):
    # What the text above claims, held; what it learns, for what the controls start with.
    _at_first = (channels.value, batch.value) == (params["channels"], params["batch"])
    assert len(first_losses) == params["steps"] and profile.trace.launches, "the steps ran on the device"
    assert profile.fusions.rows.saved.sum() > 0, "fusing saves bytes"
    _on_tpu = lesson.with_company(lesson.sides(groups.rows)[1])
    assert _on_tpu[0] / _on_tpu[1] > 0.5, "the TPU's compiler joins most convolutions with what follows"
    assert stored["padding"][0]["held"] / stored["padding"][0]["useful"] > 4, "a small batch wastes most of the tile"
    assert accuracy is None or not _at_first or accuracy >= params["accuracy"], "it learned to read"
    return


if __name__ == "__main__":
    app.run()
