# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Hello, TPU device"
# description = "What happens between a line of PyTorch and the chip: ops, launches, hits and misses. One minute."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Hello, TPU device")

with app.setup:
    import marimo as mo
    import torch

    import tpu_lab
    from tpu_lab.viz import number, page


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Hello, TPU device

    **What happens between a line of PyTorch and the chip?**

    You need nothing: where there is no TPU, the same programs are compiled for this computer's own processor.
    One minute.
    """)
    return


@app.function(hide_code=True)
def picture(mode, trace):
    """Each run a row of launches, left to right: the ops above, the launch that ran them below, hit or miss."""
    glyphs = {
        "hit": ("#009E73", "✓", "hit"),
        "miss": ("transparent", "✗", "miss"),
        "disk": ("transparent", "D", "disk hit"),
    }
    edge = "1px solid color-mix(in srgb,currentColor 60%,transparent)"
    hatch = "repeating-linear-gradient(45deg,rgb(0 0 0/.14) 0 1px,transparent 1px 5px)"
    half, rows = len(trace.launches) // 2, []
    for when, launches in (("first time", trace.launches[:half]), ("second time", trace.launches[half:])):
        columns = []
        for launch in launches:
            names = [trace.ops[i].name.split(".")[1] for i in launch.ops if trace.ops[i].kind != "view"]
            ops = "".join(
                f'<div style="flex:1 1 64px;border:{edge};border-radius:3px;padding:4px 8px;text-align:center;'
                f'background:{hatch},#56B4E9;color:#000">{name}</div>'
                for name in names
            )
            ground, glyph, word = glyphs[launch.cache]
            ink = "#fff" if launch.cache == "hit" else "currentColor"
            ring = {"hit": "#009E73", "miss": "#D55E00", "disk": "#009E73"}[launch.cache]
            columns.append(
                f'<div style="flex:{len(names)} 1 0;min-width:72px"><div style="display:flex;gap:2px">{ops}</div>'
                f'<div style="border:{edge};border-radius:3px;margin-top:3px;padding:4px 8px;display:flex;gap:8px;'
                f'justify-content:center;align-items:center"><span style="width:16px;height:16px;line-height:14px;'
                f"border-radius:3px;border:1.5px solid {ring};background:{ground};color:{ink};text-align:center;"
                f'font-weight:700;font-size:11px">{glyph}</span><span>{word}</span></div></div>'
            )
        rows.append(
            '<div style="display:flex;gap:12px;align-items:center;margin-top:8px">'
            f'<div style="width:86px;opacity:.78">{when}</div>'
            f'<div style="flex:1;display:flex;gap:10px">{"".join(columns)}</div></div>'
        )
    said = f"{mode} mode: {number.plural(half, 'launch', 'launches')} a run; " + ", ".join(
        launch.cache for launch in trace.launches
    )
    return page.Piece(
        f'<div role="figure" aria-label="{said}" style="font-size:12.5px;line-height:20px;max-width:760px">'
        f'<div style="font-weight:600">{mode}</div>{"".join(rows)}</div>',
        said,
    )


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {"device": "tpu", "rows": 64, "look": 4}
    return (params,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Four lines, four ops

    An **op** is one thing that PyTorch does: multiply, add, sum. Here are four.
    """)
    return


@app.function
def work(x, look=4):
    """Four ops, and a look at the result after one of them: a look needs the value, so everything before must run."""
    y = x * 2
    if look == 1:
        y.cpu()
    y = y + 1
    if look == 2:
        y.cpu()
    y = y.relu()
    if look == 3:
        y.cpu()
    return y.sum().cpu()


@app.cell(hide_code=True)
def _():
    # As an app the page hides its code; these lines are worth seeing.
    mo.md("```python\ny = x * 2\ny = y + 1\ny = y.relu()\nprint(y.sum())\n```") if mo.app_meta().mode == "run" else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    The device cannot run a line of Python. It runs **programs**, which a compiler makes, and starting one is a
    **launch**. Compiling takes long (✗, a **miss**), so a program is kept and found again (✓, a **hit**), as long as
    the ops *and their shapes* are the same. A program kept on disk by an earlier session is a **disk hit** (D).

    In **strict** mode each op is launched at once. In **fused** mode ops wait until somebody looks at a value, and
    then run together as one program.
    """)
    return


@app.cell(hide_code=True)
def _(params):
    rows = mo.ui.slider(16, 128, 16, value=params["rows"], debounce=True, show_value=True)
    look = mo.ui.slider(1, 4, value=params["look"], debounce=True, show_value=True)
    page.panel(("rows of x: its shape is (rows, 128)", rows), ("look after op number", look))
    return look, rows


@app.function
def watch(mode, rows, look, device):
    """Run the four lines twice in one eager mode and keep the records."""
    x = torch.ones(rows, 128).to(device)
    with torch.tpu.set_eager_mode(mode), tpu_lab.profile() as profile:
        results = [work(x, look).item() for _ in range(2)]
    return profile, results


@app.cell
def _(look, params, rows):
    strict, strict_results = watch(torch.tpu.EagerMode.DEFER_NEVER, rows.value, look.value, params["device"])
    fused, fused_results = watch(torch.tpu.EagerMode.DEFER_AND_FUSE, rows.value, look.value, params["device"])
    return fused, fused_results, strict, strict_results


@app.cell(hide_code=True)
def _(fused, strict):
    _s, _f = len(strict.trace.launches) // 2, len(fused.trace.launches) // 2
    mo.vstack(
        [
            page.heading(f"The same four ops: {_s} launches in strict mode, {_f} in fused"),
            picture("strict", strict.trace),
            picture("fused", fused.trace),
        ],
        gap=1.5,
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    Move **rows**: a shape that was never seen means new programs, and the first time is a miss. Move it back: they are
    found again. Move **look**: an early look cuts the fused program in two.
    """)
    return


@app.cell(hide_code=True)
def _(fused, strict):
    def _seconds(trace):
        return sum(launch.compile_ns for launch in trace.launches) / 1e9

    mo.md(f"""
    ## What we saw

    - {len(strict.trace.launches)} launches in strict mode and {len(fused.trace.launches)} in fused, for the same lines
      run twice.
    - This time, making programs took {_seconds(strict.trace):.2f} s in strict mode and
      {_seconds(fused.trace):.2f} s in fused. The second run had nothing to compile.
    - The results are the same. The mode decides *when* ops run, never *what* they compute.

    Next: `mingpt.py` trains a language model and shows the whole report.
    """)
    return


@app.cell
def _(fused, fused_results, look, rows, strict, strict_results):
    # What the text above claims, held.
    assert strict_results == fused_results == [rows.value * 128 * 3.0] * 2
    assert len(strict.trace.launches) == 8, "four ops, twice"
    assert len(fused.trace.launches) == (2 if look.value == 4 else 4), "one program, or two when cut"
    assert all(launch.cache == "hit" for launch in fused.trace.launches[len(fused.trace.launches) // 2 :])
    return


if __name__ == "__main__":
    app.run()
