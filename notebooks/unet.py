# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "A UNet and too many sizes"
# description = "Photographs of many sizes, and a program for each. Why it compiled again, and what padding saves. About 10 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="A UNet and too many sizes")

with app.setup:
    import time

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.lessons import unet as lesson
    from tpu_lab.lessons.runs import called, compiling, eager, once, programs
    from tpu_lab.models import data, unet
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import page

    HELD_OUT = 0  # the photograph that the network never sees in training
    # What people send: height and width of each photograph.
    SIZES = ((66, 96), (72, 90), (96, 66), (80, 104), (84, 84), (104, 80), (90, 72), (70, 110))


@app.cell(hide_code=True)
def _():
    mo.md("""
    # A UNet and too many sizes

    **Why did it compile again?**

    A UNet takes the noise off photographs. It is made of convolutions, so it takes a photograph of any size, and each
    new size is a new program that somebody waits for. You see why each one was compiled, and how padding to a few
    sizes ends it.

    You need nothing: the photographs come with scikit-image, and without a TPU the same programs are compiled for
    this computer's own processor. About 10 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "sizes": 4,
        "bucket": 32,
        "width": 8,
        "batch": 1,
        "rate": 1e-2,
        "image": 32,
        "steps": 160,
        "better": 0.0,  # dB that the UNet must be above the best filter
    }
    return (params,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Photographs come in many sizes

    A few people send a photograph, each of another size, and each sends it twice. The network is new here and knows
    nothing yet: what is compiled depends on shapes, never on weights.
    """)
    return


@app.function
def denoise(model, noisy, bucket, device):
    """Noisy pictures f32[n,3,h,w] without the noise. They are padded and cut on the CPU, where sizes cost nothing."""
    height, width = noisy.shape[-2:]
    noise = model(lesson.padded(noisy - 0.5, bucket).to(device)).cpu()
    return noisy - lesson.NOISE * noise[..., :height, :width]


@app.function
def serve(model, requests, bucket, mode, device):
    """Denoise all requests, twice, from an empty memory of programs as after a start; (profile, results)."""
    torch.tpu._clear_cache()
    with torch.no_grad(), tpu_lab.profile(mode=mode, name=f"UNet, padded to {bucket}") as profile:
        results = [denoise(model, noisy, bucket, device) for noisy in requests * 2]
    return profile, results[len(requests) :]


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    sizes, bucket = _slider("sizes", range(2, len(SIZES) + 1)), _slider("bucket", [2, 8, 16, 32, 64])
    width, batch = _slider("width", [8, 16, 24, 32]), _slider("batch", [1, 2, 4])
    mode = mo.ui.dropdown(["fused", "strict", "debug"], value=params["mode"])
    earlier = []  # the profiles of the last two settings
    page.panel(
        ("different sizes", sizes),
        ("bucket: pad to multiples of", bucket),
        ("eager mode", mode),
        ("channels of the first level", width),
        ("pictures in a request", batch),
    )
    return batch, bucket, earlier, mode, sizes, width


@app.cell
def _(batch, params, sizes, width):
    config = unet.Config(width=width.value, levels=(1, 2), image=params["image"], groups=4, noise=lesson.NOISE)
    torch.manual_seed(0)
    blank = unet.Model(config).to(params["device"])
    _photographs = data.photographs()
    requests, _generator = [], torch.Generator().manual_seed(0)
    for _i, (_height, _width) in enumerate(SIZES[: sizes.value]):
        _clean = _photographs[_i % len(_photographs)][:, 60 : 60 + _height, 110 : 110 + _width]
        requests.append(_clean + lesson.NOISE * torch.randn(batch.value, *_clean.shape, generator=_generator))
    return blank, config, requests


@app.cell
def _(blank, mode, params, requests):
    # Sizes as they come: 2 is what the network itself needs, for it halves the picture once.
    plain, plain_results = serve(blank, requests, 2, mode.value, params["device"])
    return plain, plain_results


@app.cell(hide_code=True)
def _(plain, requests):
    _sizes = " · ".join(f"{x.shape[-2]} × {x.shape[-1]}" for x in requests)
    page.stack(
        page.heading(f"{len(requests)} sizes, {programs(plain)} programs, {compiling(plain):.1f} s to make them"),
        mo.md(
            f"{_sizes}. "
            "Each of these programs was compiled (✗) or, if an earlier session had made it, read back from disk (D). The "
            "ledger says what was different from the closest earlier one."
        ),
        plain.cache,
    )
    return


@app.cell
def _(blank, bucket, earlier, mode, params, requests):
    bucketed, bucketed_results = serve(blank, requests, bucket.value, mode.value, params["device"])
    earlier[:] = [*earlier[-1:], bucketed]
    return bucketed, bucketed_results


@app.cell(hide_code=True)
def _(bucket, bucketed, earlier, plain, requests):
    page.stack(
        mo.md(f"""
        ## A few sizes instead

        Pad each photograph to the next multiple of **{bucket.value}** before it goes to the device, and cut the result
        after it came back. Both on the CPU: on the device, padding would itself be a program for each size.
        """),
        page.heading(f"Padded to multiples of {bucket.value}: programs {programs(plain)} → {programs(bucketed)}"),
        page.facts(
            (f"{programs(plain)} → {programs(bucketed)}", "programs"),
            (f"{compiling(plain):.1f} s → {compiling(bucketed):.1f} s", "making them"),
            (f"{lesson.grown(requests, bucket.value):.2f} ×", "pixels computed"),
        ),
        bucketed.cache,
        page.heading(f"What changed: {earlier[0].diff(bucketed).title}") if len(earlier) == 2 else None,
        mo.md("Larger buckets mean fewer programs and more pixels that nobody looks at. The table is plain counting:"),
        lesson.buckets_table(requests),
        mo.accordion({"Where the time went, with the views": mo.ui.tabs({"padded": bucketed, "as they come": plain})}),
    )
    return


@app.function
def ahead(params):
    """What lies beside this notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    model = unet.Model(unet.Config(width=params["width"], levels=(1, 2), groups=4)).to(params["device"])
    sizes = [torch.zeros(params["batch"], 3, *size) for size in SIZES[: params["sizes"]]]
    profile, _ = serve(model, sizes, params["bucket"], params["mode"], params["device"])
    return {"padded": profile.on(params["chip"])}


@app.cell
def _(params):
    # Compiled ahead of time for the default settings; the button does it for yours.
    stored = made_ahead.of("unet")
    now = mo.ui.run_button(label=f"Compile the padded sizes for {params['chip']} here")
    return now, stored


@app.cell(hide_code=True)
def _(bucketed, now, params, stored):
    # Without libtpu there is no compiler for a TPU: then the view says so.
    page.stack(
        mo.md(f"""
        ## The same programs on a TPU {params["chip"]}

        For the TPU's compiler, too, each size is a program of its own. Nothing runs on a TPU here: it is
        {"compiled now, for the settings above" if now.value else stored.words_at_first}.
        """),
        now,
        bucketed.chip_view(params["chip"]) if now.value else stored["padded"],
    )
    return


@app.cell(hide_code=True)
def _(params):
    longer = mo.ui.run_button(label=f"Train for {params['steps']} steps")
    trained = {}  # what was trained last, by its settings
    page.stack(
        mo.md("""
        ## Does it take the noise off?

        Four photographs to learn from, one that it never sees. The filters beside it are the classical ones, each with
        the setting that is best *for this very photograph*. All training squares have one size, so that one program
        runs again and again.
        """),
        longer,
    )
    return longer, trained


@app.function
def train(config, steps, rate, device, mode="fused"):
    """Train a UNet on all photographs but one: (model, losses, seconds). A loss is in variances of the noise."""
    torch.manual_seed(0)
    model = unet.Model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    photographs = [picture for i, picture in enumerate(data.photographs()) if i != HELD_OUT]
    compiled, losses, start = called(model, mode), [], time.perf_counter()
    with eager(mode):
        for seed in mo.status.progress_bar(range(steps), title="Training", remove_on_exit=True):
            noisy, noise = (part.to(device) for part in unet.batch(config, 8, seed, photographs))
            loss = unet.loss(compiled, noisy, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses, time.perf_counter() - start


@app.cell
def _():
    clean = data.photographs()[HELD_OUT][:, 10:170, 140:300]
    noisy = clean + lesson.NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    classical = lesson.filtered(noisy, clean)
    return classical, clean, noisy


@app.cell
def _(config, longer, noisy, params, trained):
    losses, seconds, restored = [], 0.0, None
    if longer.value or mo.app_meta().mode == "script":
        _model, losses, seconds = once(
            trained,
            (train, f"{config}"),
            lambda: train(config, params["steps"], params["rate"], params["device"]),
        )
        with torch.no_grad():
            restored = denoise(_model, noisy[None], 2, params["device"])[0]
    return losses, restored, seconds


@app.cell(hide_code=True)
def _(classical, clean, losses, noisy, restored, seconds):
    _shown = {"noisy": noisy, **classical}
    if restored is not None:
        _shown["UNet"] = restored
    _curve = None
    if restored is not None:
        _curve = lesson.loss_curve(losses, lesson.psnr(restored, clean), seconds)
    _pictures = lesson.compared(_shown, clean)
    page.stack(_pictures, _curve)
    return


@app.cell(hide_code=True)
def _(bucket, bucketed, classical, clean, plain, requests, restored):
    _best = max(lesson.psnr(picture, clean) for picture in classical.values())
    _made = (
        f"The UNet reaches {lesson.psnr(restored, clean):.1f} dB on a photograph it never saw, the best filter {_best:.1f} dB."
        if restored is not None
        else f"The best filter reaches {_best:.1f} dB. The button trains the UNet that is better."
    )
    mo.md(f"""
    ## What we saw

    - A program is made for shapes. {len(requests)} sizes needed {programs(plain)} programs; the second time around all
      were hits.
    - Each program has a reason: which input changed, from which size to which.
    - Padded to multiples of {bucket.value}, the same photographs needed {programs(bucketed)}.
    - {_made}

    Now try: strict mode, where a new size is a miss for *each op*; then a bucket of 64.
    """)
    return


@app.cell
def _(bucketed, bucketed_results, classical, clean, config, params, plain, plain_results, requests, restored):
    # What the text above claims, held; what it learns, for what the controls start with.
    _again = [launch.cache for launch in plain.trace.launches[len(plain.trace.launches) // 2 :]]
    assert set(_again) == {"hit"}, "the second time around nothing is compiled"
    assert programs(bucketed) <= programs(plain), "padding never adds sizes"
    assert [x.shape for x in bucketed_results] == [x.shape for x in plain_results] == [x.shape for x in requests]
    if restored is not None and config.width == params["width"]:
        assert (
            lesson.psnr(restored, clean) > max(lesson.psnr(x, clean) for x in classical.values()) + params["better"]
        ), "it learned"
    return


if __name__ == "__main__":
    app.run()
