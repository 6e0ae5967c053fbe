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
    import inspect
    from dataclasses import dataclass

    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab import advice, pasted
    from tpu_lab.coverage import coverage
    from tpu_lab.place import place
    from tpu_lab.trace import REASONS
    from tpu_lab.viz import ahead as made_ahead
    from tpu_lab.viz import number, page, v6e


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


@app.function(hide_code=True)
def examples():
    """{name: (code, shape of the input)}, each with something to see."""
    ready = {
        "convolutions": (
            '''
            class Net(nn.Module):
                """Two convolutions and a head, for small pictures."""

                def __init__(self, channels=16):
                    super().__init__()
                    self.first = nn.Conv2d(3, channels, 3, padding=1)
                    self.norm = nn.GroupNorm(4, channels)
                    self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
                    self.head = nn.Linear(2 * channels, 10)

                def forward(self, x):
                    x = F.gelu(self.norm(self.first(x)))
                    x = F.gelu(self.second(x))
                    return self.head(x.mean((2, 3)))
            ''',
            "32, 3, 32, 32",
        ),
        "attention": (
            '''
            class Attention(nn.Module):
                """Each position looks at those before it."""

                def __init__(self, width=64, heads=4):
                    super().__init__()
                    self.heads = heads
                    self.norm = nn.LayerNorm(width)
                    self.qkv = nn.Linear(width, 3 * width)
                    self.out = nn.Linear(width, width)

                def forward(self, x):
                    batch, time, width = x.shape
                    qkv = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1)
                    q, k, v = qkv.permute(2, 0, 3, 1, 4)
                    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    return x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
            ''',
            "8, 64, 64",
        ),
        "a table of words": (
            '''
            class Words(nn.Module):
                """The mean of some words' vectors, and a guess from it."""

                def __init__(self, words=1000, width=64):
                    super().__init__()
                    self.table = nn.Embedding(words, width)
                    self.hidden = nn.Linear(width, 4 * width)
                    self.head = nn.Linear(4 * width, 2)

                def forward(self, ids):
                    x = self.table(ids).mean(1)
                    return self.head(F.relu(self.hidden(x)))
            ''',
            "i64[64, 20]",
        ),
        "an op that TorchTPU lacks": (
            '''
            class Smooth(nn.Module):
                """An MLP with an activation that is not everywhere."""

                def __init__(self, width=128):
                    super().__init__()
                    self.up = nn.Linear(width, 4 * width)
                    self.down = nn.Linear(4 * width, width)

                def forward(self, x):
                    return x + self.down(F.mish(self.up(x)))
            ''',
            "64, 128",
        ),
        "a question in the middle": (
            '''
            class Careful(nn.Module):
                """It asks for a value before it goes on."""

                def __init__(self, width=128):
                    super().__init__()
                    self.first = nn.Linear(width, width)
                    self.second = nn.Linear(width, width)

                def forward(self, x):
                    x = self.first(x).relu()
                    if x.abs().max() > 10:  # Python must know this, so all before it runs now
                        x = x / 10
                    return self.second(x)
            ''',
            "64, 128",
        ),
    }
    return {name: (inspect.cleandoc(code) + "\n", shape) for name, (code, shape) in ready.items()}


@app.class_definition
@dataclass(frozen=True)
class Seen:
    """What is known of a model. fault: a sentence when its code did not run; then the rest is None."""

    fault: str = ""
    coverage: object = None
    profile: tpu_lab.Profile | None = None


@app.function
def look(code, shape, device):
    """Run the code: its ops against TorchTPU's list, and three training steps in fused mode under a profile."""
    doing = "The input shape"
    try:
        given = pasted.inputs(shape)
        doing = "The code"
        model = pasted.model_of(code)
        doing = "The forward pass on the CPU"  # what is wrong there is no fault of a device
        with torch.no_grad():
            model(*given)
        doing = "The step"
        seen = Seen(coverage=coverage(model, *given), profile=steps(model, given, device))
        return seen if seen.profile.trace.launches else Seen("The model calls no op on its input: nothing ran")
    except (Exception, SystemExit) as error:
        return Seen(pasted.said(error, code, doing))


@app.function
def steps(model, given, device):
    """Three training steps after two to warm up: forward, backward of the outputs' mean square, and SGD."""
    model, given = model.to(device), [one.to(device) for one in given]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-3) if weights else None

    def step():
        out = model(*given)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        losses = [leaf.float().square().mean() for leaf in leaves if leaf.requires_grad]
        if losses:
            sum(losses).backward()
        if losses and optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        torch.tpu.synchronize()  # a model without anything to learn has nothing else that makes it run

    return tpu_lab.profile(step, steps=3, warmup=2, mode="fused", name=type(model).__name__)


@app.cell(hide_code=True)
def _(params):
    example = mo.ui.dropdown(list(examples()), value=params["example"])
    held = {}  # what was run last, and what was seen of it
    earlier = []  # the profiles of the last two models
    page.stack(mo.md("## The model"), page.panel(("an example to start from", example)))
    return earlier, example, held


@app.cell(hide_code=True)
def _(example, params):
    _code, _shape = examples()[example.value]
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
        page.panel(("shape of the input: 8, 3, 32, 32 or i64[8, 64]", shape), ("", go)),
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
            held["seen"] = look(*held["asked"], params["device"])
        held["of"] = held["asked"]
        if held["seen"].profile is not None:
            earlier[:] = [*earlier[-1:], held["seen"].profile]
    seen = held["seen"]
    return seen, waits


@app.function(hide_code=True)
def figures(seen):
    """The key figures of a step, and of TorchTPU's list."""
    m, rows = seen.profile.metrics, seen.coverage.rows
    launches = len(m.launches_in(m.span))
    on_cpu = sorted({op.name for op in m.ops_in(m.span) if op.fallback})
    return page.facts(
        (f"{(rows.torch_tpu != 'missing').sum()} of {len(rows)}", "different ops that TorchTPU can do"),
        (f"{len(m.ops_in(m.span)):,}", "ops in one training step"),
        (f"{launches:,}", "launch a step, in fused mode" if launches == 1 else "launches a step, in fused mode"),
        (
            f"{len(on_cpu)}",
            "ops that this lab must run on the CPU" if len(on_cpu) != 1 else f"runs on the CPU: {on_cpu[0]}",
        ),
    )


@app.cell(hide_code=True)
def _(earlier, held, seen, waits):
    _waiting = "The code above was edited. Press the button to run it; below is what ran before." if waits else None
    _fresh = len(earlier) == 2 and earlier[1] is seen.profile
    page.stack(
        _waiting and mo.md(_waiting),
        page.stack(page.heading("It does not run yet"), page.code(seen.fault))
        if seen.fault
        else page.stack(
            page.heading(f"What changed: {earlier[0].diff(earlier[1]).title}") if _fresh else None,
            figures(seen),
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
def on_chip(profile, chip):
    """What the TPU's compiler makes of the step: the groups on the source, the memory, and the one thing to try."""
    compiled = profile.on(chip)
    return {"groups": compiled.fusions, "memory": compiled.view, "try": list(v6e.advice(compiled))}


@app.function
def ahead(params):
    """What lies beside this notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    made = {}
    for name, (code, shape) in examples().items():
        seen = look(code, shape, params["device"])
        made |= {f"{name}: {part}": shown for part, shown in on_chip(seen.profile, params["chip"]).items()}
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
    _name = next((name for name, pair in examples().items() if pair == held["asked"]), None)
    on_tpu, how, refused = None, "", ""
    if _name is not None:
        on_tpu = {part: stored[f"{_name}: {part}"] for part in ("groups", "memory", "try")}
        how = f"It is {stored.words}."
    if here.value and seen.profile is not None:
        try:
            on_tpu, how = on_chip(seen.profile, params["chip"]), "It is compiled now, from the code above."
        except (tpu_lab.aot.CompileError, ValueError) as error:
            refused = str(error)
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


@app.function
def changes(seen, tried):
    """[(what to do, why)]: what TorchTPU lacks, where a step is cut, what the records show, and what the tile wastes."""
    rows, m, found = seen.coverage.rows, seen.profile.metrics, []
    for (file, line), lacks in rows[rows.torch_tpu == "missing"].groupby(["file", "line"], sort=False):
        names = " and ".join(lacks.op.str.removesuffix(".default"))
        where = f"at {file}:{line}" if file else "somewhere in the step"
        found.append((f"Replace {names}.", f"TorchTPU 0.2.0 has no kernel for it, and would raise {where}."))
    launches = m.launches_in(m.span)
    cuts = {
        place(one.file, one.line): one for one in launches if one.reason in ("item", "bool", "print", "numpy", "cpu")
    }
    for where, one in cuts.items():
        found.append(
            (
                "Read no value inside the step.",
                f"{REASONS[one.reason]} at {where}, so all before it must run: {len(launches)} launches a step. "
                "torch.where chooses without asking.",
            )
        )
    found += [(one.act, one.evidence) for one in advice.findings(m) if not (cuts and one.kind == "wait")]
    if tried and not tried[0].startswith("Nothing"):
        found.append(tuple(tried))
    return found or [("Nothing stands out.", "TorchTPU has every op, and one step runs without a look at a value.")]


@app.cell(hide_code=True)
def _(on_tpu, seen):
    page.stack(
        mo.md("## What to change"),
        page.table(
            [{"do": act, "because": why} for act, why in changes(seen, on_tpu and on_tpu["try"])],
            caption="What to change, and why",
        ),
        None if on_tpu else mo.md("What a tile wastes is known when it was compiled for the TPU: the button above."),
    ) if seen.profile is not None else None
    return


@app.cell(hide_code=True)
def _(on_tpu, params, seen):
    _m = None if seen.profile is None else seen.profile.metrics
    _lacks = None if _m is None else seen.coverage.rows[seen.coverage.rows.torch_tpu == "missing"]
    mo.md(
        "## What we saw\n\nThe code did not run, and the sentence above says at which line. No other view is shown of it."
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
