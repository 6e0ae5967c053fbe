# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "One step, four modes"
# description = "The same training step in strict, debug, fused and compiled, side by side: its launches, its misses, its time. About 5 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="One step, four modes")

with app.setup:
    import inspect

    import marimo as mo
    import torch
    import torch.nn.functional as F
    from torch import nn

    import tpu_lab
    from tpu_lab.lessons import modes as lesson
    from tpu_lab.models import data
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import number, page

    MODES = ("debug", "strict", "fused", "compiled")
    TOLERANCE = 1e-4  # by which the losses may differ, of their size: rounding is another in each mode


@app.cell(hide_code=True)
def _():
    mo.md("""
    # One step, four modes

    **The same lines of PyTorch, run in four ways: what changes, and what stays?**

    A small network learns to read digits. One step of its training runs in **debug**, **strict** and **fused** mode
    and **compiled** with `torch.compile`, each time from the same start.

    You need nothing but this page, no TPU either. About 5 minutes.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {
        "device": "tpu",
        "chip": "v6e",
        "modes": ["debug", "strict", "fused", "compiled"],
        "width": 128,
        "layers": 3,
        "batch": 64,
        "steps": 5,
    }
    return (params,)


@app.cell(hide_code=True)
def _():
    page.table(
        [
            {"mode": "debug", "what it does with an op": "launches it and waits until it is done"},
            {"mode": "strict", "what it does with an op": "launches it and goes on"},
            {
                "mode": "fused",
                "what it does with an op": "writes it down; when a value is needed, all run as one program",
            },
            {"mode": "compiled", "what it does with an op": "nothing: torch.compile read the function beforehand"},
        ],
        caption="The modes, and what each does with an op",
    )
    return


@app.class_definition
class Block(nn.Module):
    """A norm, a matrix and a relu, and a way around them: f32[batch,width] -> the same."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


@app.function
def training(width, layers, batch, device):
    """One step of training: a function without arguments that gives its loss."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), *blocks, nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = data.digits()
    digits, truth = images[:batch].to(device), labels[:batch].to(device)

    def step():
        loss = F.cross_entropy(model(digits), truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@app.cell(hide_code=True)
def _():
    _lines = inspect.getsource(training)
    page.stack(
        mo.md("""
        ## The step

        These lines know no mode. Somebody sets it around them, once, and the step stays as it is.
        """),
        page.code(inspect.cleandoc("\n" + _lines[_lines.index("    def step") : _lines.index("    return step")])),
    )
    return


@app.function
def compare(width, layers, batch, modes, steps, device):
    """The step in each mode, from the same weights; the modes take turns, so that a busy machine is busy for all."""
    step = training(width, layers, batch, device)
    return tpu_lab.compare_modes(step, steps=steps, modes=tuple(modes), name=f"MLP d{width} L{layers} B{batch}")


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    def _box(mode):
        return mo.ui.checkbox(value=mode in params["modes"], label=mode)

    # Each by itself: of a mo.ui.dictionary that is moved twice while the step runs, marimo keeps the last move alone.
    width = _slider("width", [32, 64, 128, 256, 512])
    layers = _slider("layers", [1, 2, 3, 4, 6, 8])
    batch = _slider("batch", [16, 32, 64, 128, 256])
    debug, strict, fused, compiled = _box("debug"), _box("strict"), _box("fused"), _box("compiled")
    earlier = []  # the comparisons of the last two settings
    page.stack(
        mo.md("""
        ## Four modes on one time axis

        Change a control: the step is made anew and runs again in each mode.
        """),
        page.panel(
            ("width", width),
            ("layers", layers),
            ("batch, digits a step", batch),
            ("modes", mo.hstack([debug, strict, fused, compiled], justify="start", gap=1.5)),
        ),
    )
    return batch, compiled, debug, earlier, fused, layers, strict, width


@app.cell
def _(batch, compiled, debug, earlier, fused, layers, params, strict, width):
    chosen = {"width": width.value, "layers": layers.value, "batch": batch.value}
    modes = [mode for mode, box in zip(MODES, (debug, strict, fused, compiled)) if box.value]
    seen = None
    if modes:
        with mo.status.spinner(f"Running the step in {len(modes)} mode{'s' * (len(modes) > 1)}", remove_on_exit=True):
            seen = compare(**chosen, modes=modes, steps=params["steps"], device=params["device"])
        earlier[:] = [*earlier[-1:], seen]
    return chosen, modes, seen


@app.cell(hide_code=True)
def _(earlier, seen):
    _changed = lesson.changed(*earlier) if seen is not None and len(earlier) == 2 else None
    page.stack(
        _changed and page.heading(_changed),
        page.heading("No mode is chosen: choose one, and the step runs in it") if seen is None else seen,
    )
    return


@app.cell(hide_code=True)
def _(modes, seen):
    _shared = {"debug", "strict"} <= {*modes}
    page.stack(
        mo.md(f"""
        ## What a mode costs

        A **launch** costs the host some time, and what passes between two launches goes through memory. A **miss**
        is a program that had to be compiled; with it the first step is slow.
        {"Strict runs the programs that debug has just compiled, and so it has no misses." if _shared else ""}
        """),
        lesson.costs_table(seen),
    ) if seen is not None else None
    return


@app.cell(hide_code=True)
def _(seen):
    # One click away: what a profile of each mode shows.
    mo.accordion(
        {
            f"The whole report in {mode} mode" if mode != "compiled" else "The whole report, compiled": page.stack(
                profile, mo.accordion({f"Its {name}": profile.view(name) for name in ("ops", "fusions", "cache")})
            )
            for mode, profile in seen.profiles.items()
        }
    ) if seen is not None else None
    return


@app.function
def ahead(params):
    """What lies beside this notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    settings = {name: params[name] for name in ("width", "layers", "batch", "device")}
    made, rows = lesson.on_chip(compare(**settings, modes=MODES, steps=1).profiles, params["chip"])
    return {"memory": made["fused"].view, "groups": made["fused"].fusions, "rows": rows}


@app.cell
def _(params):
    # Compiled ahead of time for the default settings; the button does it for yours.
    stored = made_ahead.of("modes")
    here = mo.ui.run_button(label=f"Compile this step for {params['chip']} here")
    return here, stored


@app.cell
def _(chosen, here, params, seen, stored):
    # Without libtpu there is no compiler for a TPU: then this says so, and what is stored stays.
    on_tpu, memory, groups, refused = stored["rows"], stored["memory"], stored["groups"], ""
    how, sizes = stored.words_at_first, lesson.sizes(stored.params)
    if here.value:
        try:
            _made, _rows = lesson.on_chip(seen.profiles if seen is not None else {}, params["chip"])
            if not _rows:
                raise ValueError("Choose fused or compiled above: in the others a step is many small programs")
            on_tpu, how, sizes = _rows, "compiled now, for the settings above", lesson.sizes(chosen)
            memory, groups = (getattr(next(iter(_made.values())), name) for name in ("view", "fusions"))
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    return groups, how, memory, on_tpu, refused, sizes


@app.cell(hide_code=True)
def _(groups, here, how, memory, on_tpu, params, refused, sizes):
    page.stack(
        mo.md(f"""
        ## The same step on a TPU {params["chip"]}

        A TPU's compiler keeps what it can in VMEM, on the chip. At the end of a program all of it must go out to HBM:
        more programs, more bytes. Nothing runs on a TPU here: it is {how}.
        """),
        here,
        page.code(refused) if refused else None,
        lesson.chip_table(on_tpu, params["chip"], sizes),
        mo.accordion({f"Memory and padding on {params['chip']}": memory, "Groups on the source": groups}),
    )
    return


@app.cell(hide_code=True)
def _(on_tpu, params, seen, sizes):
    _rows = lesson.costs(seen) if seen is not None else []
    _launches = ", ".join(f"{row['launches a step']} {row['mode']}" for row in _rows)
    _same = f"The losses are the same in every mode, within {TOLERANCE:g} of their size. " if len(_rows) > 1 else ""
    _tpu = " and ".join(f"{number.size(row['moved'])} {row['mode']}" for row in on_tpu)
    mo.md(f"""
    ## What we saw

    - {_same}A mode decides *when* an op runs, and with which others, never *what* it computes.
    - Launches a step: {_launches or "no mode was chosen"}.
    - Programs are made in a mode's first steps, unless another mode has just made them, and then found again.
    - On {params["chip"]} a step with {sizes} moves {_tpu} through HBM.

    Now try: eight layers (which of the modes feels it?), or a width of 512, where the device has more to do than the
    host. Then `your_model.py`: the same questions of a model of yours.
    """)
    return


@app.cell
def _(chosen, modes, on_tpu, seen):
    # What the text above claims, held.
    assert all(row["bound"] > 0 and row["programs"] <= 4 for row in on_tpu), (
        "few programs, which the TPU's compiler took"
    )
    assert (seen is None) == (not modes)
    if seen is not None:
        losses = seen.rows.set_index("mode").loss.dropna()
        assert {*modes} <= {*losses.index}, "each mode ran, and gave a loss"
        assert (losses - losses.mean()).abs().max() <= TOLERANCE * losses.mean(), "every mode computes the same"
        assert losses.mean() > 0, f"a loss is positive, with {chosen}"
        _rows = {row["mode"]: row for row in lesson.costs(seen)}
        assert _rows.get("fused", {"launches a step": 1})["launches a step"] == 1, "fused: one launch a step"
        for _mode in {"strict", "debug"} & {*modes}:
            assert _rows[_mode]["launches a step"] > 10, "one launch an op"
    return


if __name__ == "__main__":
    app.run()
