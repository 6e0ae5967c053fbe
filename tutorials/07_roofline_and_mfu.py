# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 07: roofline and MFU by hand"
# description = "Count FLOPs and bytes, find the ridge of a chip, and work out the MFU of a GPT's step. About 25 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 07: roofline and MFU by hand")

with app.setup:
    import marimo as mo
    import torch

    from tpu_lab import check, chips
    from tpu_lab.models import mingpt
    from tpu_lab.viz import number, page

    sheet = check.Sheet("07", "Roofline and MFU by hand")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 07: roofline and MFU by hand

    **How fast could it be, and what keeps it from being so?**

    You need tutorials 01 to 06, and paper and pencil: here you work out what the reports print. A blank takes an
    expression as well: `6 * 7` is as good as 42. About 25 minutes.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 7.1 · FLOPs and bytes

    A layer is `x @ w`, with `x: f32[512,256]` and `w: f32[256,1024]`. Each value of the result is a sum of products. A
    multiplication and the addition that follows it are 2 FLOPs. It has to read `x` and `w` and to write the result.

    Predict: how many FLOPs is the matmul, and how many bytes does it move?
    """)
    return


@app.cell
def _():
    work = ...  # yours: (FLOPs, bytes); expressions will do
    return (work,)


@app.cell(hide_code=True)
def _(work):
    def layer(x, w):
        return x @ w

    _x, _w = torch.ones(512, 256, device="tpu"), torch.ones(256, 1024, device="tpu")
    layer_profile = check.attempt(layer, _x, _w, mode="strict", fresh=True).profile
    matmul = next(op for op in layer_profile.trace.ops if op.kind == "matmul")
    by_hand = sheet.predict(
        "7.1",
        work,
        (matmul.flops, matmul.bytes),
        title="FLOPs and bytes",
        name="work",
        within=0.01,
        right=f"{matmul.flops / matmul.bytes:.3g} FLOPs for each byte: the matmul's intensity.",
        hints=(
            "how many values has the result, and how many products are summed for one of them?",
            "FLOPs: each product is one multiply-add. Bytes: three arrays, 512 × 256, 256 × 1024 and 512 × 1024 values.",
            "a float32 has 32 bits.",
        ),
        record="p.ops.rows",
    )
    by_hand
    return by_hand, layer_profile, matmul


@app.cell(hide_code=True)
def _(layer_profile, work):
    mo.accordion({"Look: it stands under the roof": layer_profile.roofline}) if work is not ... else None
    return


@app.cell(hide_code=True)
def _():
    _v6e = chips.CHIPS["v6e"]
    ridge = _v6e.bf16 / _v6e.bandwidth
    page.stack(
        mo.md("""
        ## 7.2 · Which roof?

        A chip that can do F FLOP/s and move B bytes/s is kept busy by F / B FLOPs for each byte: the **ridge**. What
        has a lower intensity waits for memory, what has a higher one for arithmetic.
        """),
        page.facts(
            (f"{_v6e.bf16 / 1e12:.0f} TFLOP/s", "a v6e, bf16, published"),
            (f"{_v6e.bandwidth / 1e12:.2f} TB/s", "its memory, published"),
        ),
        mo.md("""
        The same layer in bfloat16 has the same FLOPs and half the bytes. Predict: on a v6e, is it bound by `"memory"`
        or by `"compute"`?
        """),
    )
    return (ridge,)


@app.cell
def _():
    bound = ...  # yours: "memory" or "compute"
    return (bound,)


@app.cell(hide_code=True)
def _(bound, matmul, ridge):
    _intensity = matmul.flops / (matmul.bytes / 2)
    which_roof = sheet.predict(
        "7.2",
        bound,
        "compute" if _intensity >= ridge else "memory",
        title="which roof?",
        name="bound",
        right=f"The ridge is at {ridge:.0f} FLOPs a byte, the layer at {_intensity:.0f}.",
        hints=(
            "two divisions: the chip's FLOP/s by its bytes/s, and the layer's FLOPs by its bytes.",
            "half the bytes: the intensity is twice that of 7.1.",
            "below the ridge the arithmetic waits for bytes.",
        ),
    )
    which_roof
    return (which_roof,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 7.3 · Enough rows

    The weights are read once, however many rows `x` has. So more rows (a larger batch, longer texts) mean more FLOPs a
    byte. Take a layer of a large model on a v6e: `x: bf16[n,4096]`, `w: bf16[4096,16384]`.

    Predict: how many rows n does it take at least to be bound by compute? Within 1%.
    """)
    return


@app.cell
def _():
    rows = ...  # yours: a number
    return (rows,)


@app.cell(hide_code=True)
def _(ridge, rows):
    def _intensity(n, inner=4096, outer=16384):
        return 2 * n * inner * outer / (2 * (n * inner + inner * outer + n * outer))

    _needed = next(n for n in range(1, 5000) if _intensity(n) >= ridge)
    enough_rows = sheet.predict(
        "7.3",
        rows,
        _needed,
        title="enough rows",
        name="rows",
        within=0.01,
        right=f"From {_needed} rows on. A model that writes one letter at a time has one row for each text: it waits for memory.",
        hints=(
            "write FLOPs and bytes with n in them, as in 7.1, with 2 bytes a value.",
            "the intensity is n · 4096 · 16384 / (n · 4096 + 4096 · 16384 + n · 16384). Where is it the ridge?",
            "a list of n and their intensities is a way, too: `next(n for n in range(1, 5000) if ...)`.",
        ),
    )
    enough_rows
    return (enough_rows,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 7.4 · The model FLOPs of a GPT

    **Model FLOPs** of a training step are what the model needs by its formula, whatever the program does besides. One
    token costs 2 FLOPs for each weight it is multiplied by:

    - a layer: `qkv` width → 3 width, `proj` width → width, `fc` width → 4 width, `proj` 4 width → width;
    - its attention: scores q·k and mixing with v, each 2 · block · width; causal attention counts half of that;
    - the head, once: width → vocabulary. Embeddings look up, and count nothing.

    Backward is twice forward. Do: the FLOPs of one training step on `batch` texts of `block` letters.
    """)
    return


@app.cell
def _():
    def step_flops(layers, width, block, vocabulary, batch):
        return ...  # yours: a number

    return (step_flops,)


@app.cell(hide_code=True)
def _(step_flops):
    _sizes = [(1, 32, 16, 96, 4), (2, 32, 16, 96, 8), (3, 64, 128, 96, 1), (12, 768, 1024, 50257, 8)]

    def _all():
        return [step_flops(*sizes) for sizes in _sizes]

    def _test(tried):
        for sizes, mine in zip(_sizes, tried.value, strict=True):
            layers, width, block, vocabulary, batch = sizes
            config = mingpt.Config(layers=layers, heads=1, width=width, block=block, vocabulary=vocabulary)
            ratio = float(mine) / mingpt.flops(config, batch)
            if not abs(ratio - 1) <= 1e-6:
                return f"for layers, width, block, vocabulary, batch = {sizes} it is {ratio:.3g} times what the model needs."
        return None

    of_a_gpt = sheet.do(
        "7.4",
        check.attempt(_all, shows=step_flops, name="step_flops"),
        title="the model FLOPs of a GPT",
        test=_test,
        right="As the lab counts it.",
        why="The largest of the four is GPT-2 small: 6.5 TFLOP for a step on 8 texts of 1,024 tokens.",
        todo="Three lines are enough.",
        hints=(
            "add up a layer's weights in units of width²: 3 + 1 + 4 + 4.",
            "one token: `layers * (2 * 12 * width**2 + ...) + 2 * width * vocabulary`.",
            "attention, halved, is 2 · block · width a token and layer. Then times tokens, times 3.",
        ),
    )
    of_a_gpt
    return (of_a_gpt,)


@app.cell(hide_code=True)
def _():
    def train(config, batch, steps):
        torch.manual_seed(0)
        model = mingpt.Model(config).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(steps):
            mingpt.loss(model, *(part.to("tpu") for part in mingpt.batch(config, batch, seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return True

    _config = mingpt.Config(layers=1, heads=2, width=64, block=64)
    gpt = check.attempt(train, _config, 8, 6, mode="fused", fresh=True).profile
    page.stack(
        mo.md("""
        ## 7.5 · MFU

        **Model FLOPs utilisation** is the part of the chip's peak that the model made use of: its FLOPs by the time
        and the peak. Compiling is no part of a step's time: it happens once. Here is the step of a small GPT on this
        computer.
        """),
        page.facts(
            (f"{gpt.metrics.flops / 1e9:.3g} GFLOP", "a step"),
            (number.time(gpt.metrics.step_split.total), "a step, the mean of six, measured"),
            (number.time(gpt.metrics.step_split.compile), "of it compiling"),
            (f"{gpt.metrics.peak.flops / 1e9:.3g} GFLOP/s", f"{gpt.metrics.peak.label}, measured"),
        ),
        mo.md("""
        Do: the MFU, from the FLOPs of a step, the seconds that it took in all, the seconds of these that were
        compiling, and the peak in FLOP/s.
        """),
    )
    return (gpt,)


@app.cell
def _():
    def mfu(flops, seconds, compiling, peak):
        return ...  # yours: a number, 1 for all of the peak

    return (mfu,)


@app.cell(hide_code=True)
def _(gpt, mfu):
    _m = gpt.metrics
    _cases = [
        (_m.flops, _m.step_split.total / 1e9, _m.step_split.compile / 1e9, _m.peak.flops, _m.mfu),
        (459e12, 3.0, 1.0, 918e12, 0.25),
    ]

    def _all():
        return [mfu(*case[:4]) for case in _cases]

    def _test(tried):
        for (work, seconds, compiling, peak, right), mine in zip(_cases, tried.value, strict=True):
            if not abs(float(mine) / right - 1) <= 1e-3:
                return (
                    f"{work:.3g} FLOPs in {seconds:.3g} s, {compiling:.3g} s of it compiling, at a peak of "
                    f"{peak:.3g} FLOP/s: it is not {float(mine):.3g}."
                )
        return None

    by_hand_mfu = sheet.do(
        "7.5",
        check.attempt(_all, shows=mfu, name="mfu"),
        title="MFU",
        test=_test,
        right="The MFU of the report.",
        why=f"The small GPT makes use of {100 * _m.mfu:.2g}% of what this computer can do: its matmuls are small.",
        todo="One line is enough.",
        hints=(
            "which part of `seconds` is the step's own?",
            "FLOPs divided by seconds is a rate, FLOP/s. A rate divided by the peak is a part of it.",
            "half the peak for two seconds is one second's peak.",
        ),
    )
    by_hand_mfu
    return (by_hand_mfu,)


@app.cell(hide_code=True)
def _(gpt, by_hand_mfu):
    mo.accordion({"Look: the report with its MFU": gpt, "Look: the roofline of the step": gpt.roofline}) if by_hand_mfu.passed else None
    return


@app.cell(hide_code=True)
def _(by_hand, by_hand_mfu, enough_rows, of_a_gpt, which_roof):
    score = sheet.show(by_hand, which_roof, enough_rows, of_a_gpt, by_hand_mfu, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - FLOPs by bytes is the intensity; a chip's FLOP/s by its bytes/s is the ridge. The smaller of the two roofs rules.
    - Rows pay for weights: few rows wait for memory.
    - Model FLOPs come from the model's formula, and MFU from them, a time without compiling, and a peak that has a name.

    Next: `08_capstone.py`, a slow training step that you make fast.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
