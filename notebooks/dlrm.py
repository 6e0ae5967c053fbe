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
    from collections import Counter
    from dataclasses import dataclass

    import marimo as mo
    import torch
    import torch.nn.functional as F

    import tpu_lab
    from tpu_lab.models import data, dlrm
    from tpu_lab.roofline import Roofline
    from tpu_lab.targets import target
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import number, page

    UNSEEN, PART = 65_536, 16_384  # flights held out, and how many of them are judged at a time
    AT_ONCE = ("script", None)  # where no button can be pressed: as a script, and outside marimo
    LOOKUPS, OPTIMIZER = "lookups and their gradients", "optimizer"


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


@app.function
def logistic(measured, late):
    """A logistic regression on what is measured, fitted on all flights but the held-out ones: a score for each flight."""
    x = torch.cat([measured, torch.ones(len(measured), 1)], dim=1)
    weight = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=30)

    def closure():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x[:-UNSEEN] @ weight, late[:-UNSEEN])
        loss.backward()
        return loss

    optimizer.step(closure)
    return (x @ weight).detach()


@app.cell
def _(late, measured):
    baseline = logistic(measured, late)[-UNSEEN:]
    to_beat = dlrm.auc(baseline, late[-UNSEEN:])
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
def pick(columns, chosen, config):
    """Some flights: late or not, what was measured, and the names, each within its table."""
    late, measured, *names = (column[chosen] for column in columns)
    return [late, measured, *(ids % rows for ids, rows in zip(names, config.heights, strict=True))]


@app.function
def config_of(chosen):
    """The model's sizes; it sees three measures of the flight and six of the weather."""
    return dlrm.Config(width=chosen["width"], rows=chosen["rows"], joined=chosen["joined"], measures=9)


@app.function
def run(chosen, steps, params, columns, title):
    """Train a new model for `steps` steps with the settings in `chosen`, watched by a profile."""
    config, size, mode = config_of(chosen), chosen["batch"], chosen["mode"]
    torch.manual_seed(0)
    model = dlrm.Model(config).to(params["device"])
    called = torch.compile(model) if mode == "compile" else model
    picks = torch.randint(len(columns[0]) - UNSEEN, (steps, size))
    batches = ([part.to(params["device"]) for part in pick(columns, some, config)] for some in picks)
    with tpu_lab.profile(
        name=f"DLRM d{config.width} B{size}{', one table' if config.joined else ''}",
        flops=dlrm.flops(config, size),
        mode="fused" if mode == "compile" else mode,  # the model is compiled, the optimizer around it is fused
    ) as profile:
        training = train(called, batches, params["rate"])
        losses = list(mo.status.progress_bar(training, total=steps, title=title, remove_on_exit=True))
    return Run(losses, model, profile)


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    _tables = {"one for each kind of name": False, "one for all names": True}
    _named = {
        "mode": ("eager mode", mo.ui.dropdown(["strict", "debug", "fused", "compile"], value=params["mode"])),
        "batch": ("batch, flights a step", _slider("batch", [128, 256, 512, 1024, 2048, 4096])),
        "width": ("embedding width", _slider("width", [4, 8, 16, 32, 64, 128])),
        "rows": ("rows a table has at most", _slider("rows", [16, 64, 256, 1024, 10_000])),
        "joined": ("tables", mo.ui.dropdown(_tables, value=list(_tables)[params["joined"]])),
    }
    controls = mo.ui.dictionary({name: control for name, (_, control) in _named.items()})
    earlier = []  # the profiles of the last two settings
    page.stack(
        mo.md("""
        ## Train a few steps, and look

        Change a control: a new model trains with it. With fewer rows than names, some names share a row.
        """),
        page.panel(*((label, controls[name]) for name, (label, _) in _named.items())),
    )
    return controls, earlier


@app.cell
def _(controls, earlier, late, measured, names, params):
    chosen = dict(controls.value)
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


@app.function
def parts(profile):
    """FLOPs and bytes of a step by what they are for: {part: (FLOPs, bytes)}."""
    m = profile.metrics
    found = dict.fromkeys((LOOKUPS, OPTIMIZER, "matmuls", "all else"), (0.0, 0.0))
    for i in m.step_ops:
        op = m.trace.ops[i]
        part = OPTIMIZER if op.phase == "optimizer" else "matmuls" if op.kind == "matmul" else "all else"
        part = LOOKUPS if "embedding" in op.name else part
        if op.kind != "view":
            found[part] = (found[part][0] + op.flops / m.n, found[part][1] + op.bytes / m.n)
    return found


@app.cell
def _(short):
    split = parts(short.profile)
    _flops, _bytes = (sum(column) for column in zip(*split.values(), strict=True))
    shares = {part: (flops / _flops, moved / _bytes) for part, (flops, moved) in split.items()}
    return shares, split


@app.cell(hide_code=True)
def _(shares, short, split):
    _held = sum(table.weight.numel() for table in short.model.tables)
    page.stack(
        mo.md("""
        ## Where the bytes go

        A lookup reads a row and writes it: bytes, and **no arithmetic**. Its gradient is as large as the whole table,
        though a batch touches few of its rows, and the optimizer reads and writes every row of it, with its two moments.
        The matmuls do all the arithmetic.
        """),
        page.table(
            [
                {
                    "part of a step": part,
                    "FLOPs": f"{100 * shares[part][0]:.0f}%",
                    "bytes": f"{100 * shares[part][1]:.0f}%",
                    "MB moved": number.sig(moved / 1e6),
                    "FLOP per byte": number.sig(flops / moved) if flops else "0",
                }
                for part, (flops, moved) in split.items()
            ],
            caption="FLOPs and bytes of a step by part",
        ),
        page.facts(
            (f"{_held / sum(p.numel() for p in short.model.parameters()):.1%}", "of the parameters are in tables"),
            (f"{shares[LOOKUPS][1] + shares[OPTIMIZER][1]:.0%}", "of the bytes move for them: lookups and optimizer"),
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
        each has a time. The first time, some sixty programs are compiled for it.
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


@app.function(hide_code=True)
def under_roofs(profile):
    """The roofline of a profile, and what it allows a lookup."""
    roofs = Roofline(profile.metrics)
    lookup = next(p for p in roofs.points if p.cost.name.startswith("tables") and p.cost.phase == "forward")
    return page.stack(
        profile.roofline,
        page.facts(
            (f"{number.sig(lookup.intensity)} FLOP/B", "a lookup does"),
            (f"{number.sig(roofs.ridge)} FLOP/B", "it would need to keep the arithmetic busy: the ridge"),
            (f"{100 * lookup.possible / roofs.peak:.2g}%", "of the peak is all that its roof allows"),
        ),
    )


@app.cell(hide_code=True)
def _(strict):
    under_roofs(strict.profile) if strict else None
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
    on_tpu, figures, how, refused = stored["view"], stored["figures"], stored.words, ""
    if here.value:
        try:
            _compiled = short.profile.on(params["chip"])
            on_tpu, how = _compiled.view, "compiled now, for the settings above"
            figures = [figure(_compiled, chosen["joined"])]
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
    return figures, how, on_tpu, refused


@app.cell(hide_code=True)
def _(figures, here, how, on_tpu, params, refused):
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
            [dict(zip(("tables", "gathers", "scatters", "HBM takes", "arithmetic takes"), row)) for row in figures],
            caption="The step on the TPU, with seven tables and with one",
        ),
        on_tpu,
    )
    return


@app.function
def figure(compiled, joined):
    """What XLA:TPU made of a step: tables, gathers, scatters, and the least time of HBM and of arithmetic."""
    placed = [part.placed for part in compiled.parts if part.placed]
    inside = Counter(i.opcode for p in placed for c in p.module.computations.values() for i in c.instructions)
    least = [f"\u2265 {number.time(sum(p.bound_ns[k] for p in placed))}" for k in (0, 1)]
    return ["one" if joined else "seven", inside["gather"], inside["scatter"], *least]


@app.function
def ahead(params):
    """What lies beside this notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    made = {}
    for joined in (False, True):
        model = dlrm.Model(config_of({**params, "joined": joined})).to(params["device"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=params["rate"])
        late, dense, *names = dlrm.batch(model.config, params["batch"])
        measured = torch.zeros(len(late), 9)  # only shapes count
        batch = [part.to(params["device"]) for part in (late, measured, *names)]

        def step(model=model, optimizer=optimizer, batch=batch):
            dlrm.loss(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        name = f"DLRM d{params['width']} B{params['batch']}{', one table' if joined else ''}"
        made[joined] = tpu_lab.compile_for(step, chip=params["chip"], name=name)
    return {"view": made[params["joined"]].view, "figures": [figure(c, joined) for joined, c in made.items()]}


@app.cell(hide_code=True)
def _(params):
    more = mo.ui.run_button(label=f"Train a new model for {params['longer']} steps")
    page.stack(mo.md("## Will it be late?\n\nWith the controls above, in fused mode."), more)
    return (more,)


@app.function
def judge(model, columns, device):
    """The model's scores of the held-out flights."""
    rows = torch.arange(len(columns[0]) - UNSEEN, len(columns[0]))
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE), torch.no_grad():
        seen = [[part.to(device) for part in pick(columns, some, model.config)] for some in rows.split(PART)]
        return torch.cat([model(measured, *names).cpu() for _, measured, *names in seen])


@app.cell
def _(chosen, columns, late, more, params):
    longer, scores, reached = None, None, None
    if more.value or mo.app_meta().mode in AT_ONCE:
        _said = f"Training {params['longer']} steps"
        longer = run({**chosen, "mode": "fused"}, params["longer"], params, columns, _said)
        scores = judge(longer.model, columns, params["device"])
        reached = dlrm.auc(scores, late[-UNSEEN:])
    return longer, reached, scores


@app.function(hide_code=True)
def judged(scores, baseline, late, losses):
    """Both models' finds against false alarms, and the loss of the training."""
    alarms, window = torch.linspace(0, 1, 51), min(20, len(losses))
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(1).tolist()
    return page.beside(
        page.curve(
            {"DLRM": dlrm.roc(scores, late, alarms), "logistic": dlrm.roc(baseline, late, alarms)},
            f"AUC {dlrm.auc(scores, late):.3f} on flights it never saw, {dlrm.auc(baseline, late):.3f} by logistic regression",
            x="of the flights on time, taken for late",
            y="of the late flights, found",
            at=alarms.tolist(),
        ),
        page.curve(
            smooth,
            f"{smooth[-1]:.2f} nats a flight after {len(losses)} steps, {losses[0]:.2f} at first",
            y=f"loss, mean of {window} steps",
            at=range(window, len(losses) + 1),
        ),
        widths=(480, 480),
    )


@app.cell(hide_code=True)
def _(baseline, late, longer, scores):
    judged(scores, baseline, late[-UNSEEN:], longer.losses) if longer else None
    return


@app.cell(hide_code=True)
def _(reached, shares, to_beat):
    _told = f"It ranks late flights with an AUC of {reached:.3f}." if reached else "The button trains it."
    mo.md(f"""
    ## What we saw

    - Lookups, their gradients and the optimizer move {shares[LOOKUPS][1] + shares[OPTIMIZER][1]:.0%} of a step's bytes
      and do none of its matmuls. Their roof is the memory's: faster arithmetic cannot help, fewer bytes can.
    - One table for all names gives the same model with fewer lookups.
    - {_told} A logistic regression that sees no names has {to_beat:.3f}.

    Now try: 16 rows a table (which bytes are gone, what does the AUC lose?), or a batch of 4096: who moves most now?
    """)
    return


@app.cell
def _(params, reached, short, split, stored, to_beat):
    # What the text above claims, held.
    assert len(short.losses) == params["steps"] and short.profile.trace.launches, "the steps ran on the device"
    assert split[LOOKUPS][0] == 0 < split[LOOKUPS][1], "a lookup moves bytes and multiplies nothing"
    _gathers = [gathers for _, gathers, *_ in stored["figures"]]
    assert _gathers[0] > _gathers[1], "one table needs fewer gathers"
    assert reached is None or reached > to_beat + params["better"], "names help"
    return


if __name__ == "__main__":
    app.run()
