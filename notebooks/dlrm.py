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
    import torch.nn.functional as F

    import tpu_lab
    from tpu_lab.models import data, dlrm
    from tpu_lab.viz import number, page

    UNSEEN, PART = 65_536, 16_384  # flights held out, and how many of them are judged at a time


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
        "batch": 2048,
        "width": 16,
        "rows": 10_000,
        "joined": False,
        "steps": 16,
        "rate": 3e-3,
        "apart": 6,
        "longer": 200,
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
def auc(scores, late):
    """How often a late flight has a higher score than one on time: 0.5 is guessing, 1 is knowing."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (count.cumsum(0) - (count - 1) / 2).double()[place]  # equal scores share the mean of their ranks
    positive = late.sum().double()
    return ((ranks[late > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(late) - positive))).item()


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
    to_beat = auc(baseline, late[-UNSEEN:])
    return baseline, to_beat


@app.cell(hide_code=True)
def _(late, to_beat):
    page.stack(
        mo.md("""
        ## The flights

        Every flight that left New York in 2013 and arrived, with the weather at its departure. A fifth of them is held
        out. A **logistic regression** sees what is measured: distance, planned times, six figures of the weather. Its
        **AUC** says how often it ranks a late flight above one on time; that is what the model must beat.
        """),
        page.facts(
            (f"{len(late):,}", "flights that arrived"),
            (f"{late.mean():.1%}", "over 15 minutes late"),
            (f"{sum(dlrm.TABLES.values()):,}", f"names in {len(dlrm.TABLES)} tables"),
            (f"{to_beat:.3f}", "AUC of the logistic regression"),
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
def run(chosen, steps, params, columns, title, mode=None):
    """Train a new model for `steps` steps with the settings in `chosen`, watched by a profile."""
    mode, size = mode or chosen["mode"], chosen["batch"]
    config = dlrm.Config(
        width=chosen["width"], bottom=(64, 32), top=(64, 32), rows=chosen["rows"],
        measures=columns[1].shape[1], joined=chosen["joined"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = dlrm.Model(config).to(params["device"])
    called = torch.compile(model) if mode == "compile" else model
    picks = torch.randint(len(columns[0]) - UNSEEN, (steps, size))
    batches = ([part.to(params["device"]) for part in pick(columns, chosen, config)] for chosen in picks)
    with tpu_lab.profile(
        name=f"DLRM d{config.width} B{size}{' one table' if config.joined else ''}",
        flops=dlrm.flops(config, size),
        mode="fused" if mode == "compile" else mode,  # the model is compiled, the optimizer around it is fused
    ) as profile:
        losses = mo.status.progress_bar(
            train(called, batches, params["rate"]), total=steps, title=title, remove_on_exit=True
        )
        losses = list(losses)
    return Run(losses, model, profile)


@app.function
def pick(columns, chosen, config):
    """Some flights: late or not, what was measured, and the names, each within its table."""
    late, measured, *names = (column[chosen] for column in columns)
    return [late, measured, *(ids % rows for ids, rows in zip(names, config.heights, strict=True))]


@app.cell(hide_code=True)
def _(params):
    def _slider(name, steps):
        return mo.ui.slider(steps=sorted({*steps, params[name]}), value=params[name], debounce=True, show_value=True)

    _tables = {"one for each kind of name": False, "one for all names": True}
    _named = {
        "mode": ("eager mode", mo.ui.dropdown(["strict", "debug", "fused", "compile"], value=params["mode"])),
        "batch": ("batch, flights a step", _slider("batch", [256, 512, 1024, 2048, 4096, 8192])),
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
    mo.accordion(
        {
            "The whole report": short.profile,
            **{
                f"{words}": mo.lazy(lambda name=name: short.profile.view(name))
                for name, words in (
                    ("ops", "Every op"),
                    ("fusions", "Fusions"),
                    ("cache", "Cache"),
                    ("memory", "Memory"),
                )
            },
        }
    )
    return


@app.function
def parts(profile):
    """FLOPs and bytes of a step by what they are for: {part: (FLOPs, bytes)}."""
    m = profile.metrics
    found = dict.fromkeys(("lookups and their gradients", "optimizer", "matmuls", "all else"), (0.0, 0.0))
    for i in m.step_ops:
        op = m.trace.ops[i]
        part = "optimizer" if op.phase == "optimizer" else "matmuls" if op.kind == "matmul" else "all else"
        part = "lookups and their gradients" if "embedding" in op.name else part
        if op.kind != "view":
            found[part] = (found[part][0] + op.flops / m.n, found[part][1] + op.bytes / m.n)
    return found


@app.cell(hide_code=True)
def _(short):
    _parts = parts(short.profile)
    _all = [sum(column) for column in zip(*_parts.values(), strict=True)]
    page.stack(
        mo.md("""
        ## Where the bytes go

        A lookup reads a row and writes it: **no arithmetic for the bytes it moves**. Its gradient is as large as the
        whole table, though a batch touches few rows, and the optimizer reads and writes every row of it, four arrays
        of that size. The matmuls do all the arithmetic and little of the moving.
        """),
        page.table(
            [
                {
                    "part of a step": part,
                    "% of FLOPs": f"{100 * flops / _all[0]:.0f}",
                    "% of bytes": f"{100 * moved / _all[1]:.0f}",
                    "MB moved": f"{moved / 1e6:.2f}",
                    "FLOP per byte": number.sig(flops / moved) if moved else "0",
                }
                for part, (flops, moved) in _parts.items()
            ],
            caption="FLOPs and bytes of a step by part",
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
        each has a time. The first time, some eighty programs are compiled: half a minute.
        """),
        apart,
    )
    return (apart,)


@app.cell
def _(apart, chosen, columns, params):
    strict = None
    if apart.value or mo.app_meta().mode == "script":
        strict = run(chosen, params["apart"], params, columns, "Training op by op", mode="strict")
    strict.profile.roofline if strict else None
    return (strict,)


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


@app.function
def found(scores, late, alarms):
    """Of the late flights, the share found when this share of those on time is taken for late, too."""
    ordered = late[scores.argsort(descending=True)].double()
    hits, false = ordered.cumsum(0) / late.sum(), (1 - ordered).cumsum(0) / (1 - late).sum()
    return hits[(torch.searchsorted(false, alarms.double(), right=True) - 1).clamp_min(0)].tolist()


@app.cell
def _(chosen, columns, late, more, params):
    longer, scores, reached = None, None, None
    if more.value or mo.app_meta().mode == "script":
        longer = run(chosen, params["longer"], params, columns, f"Training {params['longer']} steps", mode="fused")
        scores = judge(longer.model, columns, params["device"])
        reached = auc(scores, late[-UNSEEN:])
    return longer, reached, scores


@app.cell(hide_code=True)
def _(baseline, late, longer, reached, scores, to_beat):
    mo.stop(longer is None)
    _alarms = torch.linspace(0, 1, 51)
    _lines = {"DLRM": scores, "logistic": baseline}
    page.beside(
        page.curve(
            {name: found(given, late[-UNSEEN:], _alarms) for name, given in _lines.items()},
            f"AUC {reached:.3f} on flights it never saw, {to_beat:.3f} by logistic regression",
            x="of the flights on time, taken for late", y="of the late flights, found", at=_alarms.tolist(),
        ),
        page.curve(longer.losses, f"{longer.losses[-1]:.3f} nats after {len(longer.losses)} steps", y="loss, nats a flight"),
        widths=(480, 480),
    )  # fmt: skip
    return


@app.cell(hide_code=True)
def _(reached, short, to_beat):
    _parts = parts(short.profile)
    _moved = sum(moved for _, moved in _parts.values())
    _share = sum(_parts[part][1] for part in ("lookups and their gradients", "optimizer")) / _moved
    _told = f"It ranks late flights with an AUC of {reached:.3f}." if reached else "The button trains it."
    mo.md(f"""
    ## What we saw

    - Lookups, their gradients and the optimizer move {_share:.0%} of a step's bytes and do none of its matmuls.
    - So embeddings wait for memory: no faster arithmetic helps, only fewer bytes.
    - {_told} A logistic regression that sees no names has {to_beat:.3f}.

    Now try: 16 rows a table (what does a step save, what does the AUC lose?), or a width of 128.
    """)
    return


@app.cell
def _(params, reached, short, to_beat):
    # What the text above claims, held.
    assert len(short.losses) == params["steps"] and short.profile.trace.launches, "the steps ran on the device"
    _lookups = parts(short.profile)["lookups and their gradients"]
    assert _lookups[0] == 0 and _lookups[1] > 0, "a lookup moves bytes and multiplies nothing"
    assert reached is None or reached > to_beat + params["better"], "names help"
    return


if __name__ == "__main__":
    app.run()
