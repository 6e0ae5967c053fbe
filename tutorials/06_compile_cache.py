# /// script
# requires-python = ">=3.11"
# dependencies = ["tpu-lab"]
#
# [tool.marimo.display]
# theme = "system"
#
# [tool.marimo.opengraph]
# title = "Tutorial 06: the compile cache"
# description = "Eight programs for one model become one: pad, pass numbers as tensors, choose buckets. About 25 minutes."
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Tutorial 06: the compile cache")

with app.setup:
    import dataclasses

    import marimo as mo
    import torch
    import torch.nn.functional as F

    from tpu_lab import check
    from tpu_lab.models import data, mingpt
    from tpu_lab.viz import page

    sheet = check.Sheet("06", "From 8 misses to 1")


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Tutorial 06: the compile cache

    **Why is a program made again, and how do 8 misses become 1?**

    You need tutorials 01 to 05. About 25 minutes.

    A program is made for certain ops on certain shapes, and kept. The next time it is a **hit**. When anything of its key
    differs, it is a **miss**, and on a real chip a miss costs seconds to minutes.
    """)
    return


@app.function
def nats(model, read, follow):
    """How surprised the model is by a line, in nats. Places where `follow` is -100 do not count."""
    with torch.no_grad():
        logits = model(read.to("tpu"))
        return F.cross_entropy(logits.flatten(0, 1), follow.to("tpu").flatten(), reduction="sum").item()


@app.cell
def _():
    # Nine lines of Python's standard library, which a small GPT reads letter by letter.
    lines = [
        "return self.mandatory",
        "import os",
        'return "_Feature" + repr((self.optional,',
        "class Popen:",
        "if not isinstance(arg, str):",
        "class _Feature:",
        "class Collection(Sized, Iterable, Container):",
        "return NotImplemented",
        "def __init__(self, cmd, env=None):",
    ]
    letters = [data.encode(line)[None] for line in lines]  # int64[1,n] each
    return letters, lines


@app.cell(hide_code=True)
def _(letters, lines):
    def _plain(model):
        return [nats(model, ids[:, :-1], ids[:, 1:]) for _ in range(2) for ids in letters]

    torch.manual_seed(0)
    model = mingpt.Model(mingpt.Config(layers=1, heads=2, width=32, block=64)).to("tpu").eval()
    before = check.attempt(_plain, model, name="plain", mode="fused", fresh=True)
    page.table(
        [{"line": line, "letters": len(line), "read by the model": f"i64[1,{len(line) - 1}]"} for line in lines],
        "The lines, their letters and the shape that the model reads",
    )
    return before, model


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 6.1 · Count the misses

    The model reads all letters but the last of a line and guesses the one that follows. It goes through the nine lines
    above, each at its own length, and then through all of them **once more**.

    Predict: how many misses in all?
    """)
    return


@app.cell
def _():
    misses = ...  # yours: a number
    return (misses,)


@app.cell(hide_code=True)
def _(before, misses):
    count_misses = sheet.predict(
        "6.1",
        misses,
        check.measure(before.profile, "misses"),
        title="count the misses",
        name="misses",
        right="One for each shape: two lines are equally long, and the second time all are found.",
        hints=(
            "does the program depend on which letters a line has, or on how many?",
            "look for two lines of the same length.",
            "what was made the first time is still there the second time.",
        ),
        record="p.cache.rows",
    )
    count_misses
    return (count_misses,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 6.2 · The cause

    Each miss is compared with the *closest* program made before, and the lab says what differs. There are ten causes:
    `first`, `shape`, `dtype`, `constant`, `ops`, `live set`, `donation`, `option`, `mode`, `view`.

    Predict: what is the cause of the second miss? A text.
    """)
    return


@app.cell
def _():
    cause = ...  # yours: a text
    return (cause,)


@app.cell(hide_code=True)
def _(before, cause):
    _second = before.profile.trace.compiles[1]
    the_cause = sheet.predict(
        "6.2",
        cause,
        _second.cause,
        title="the cause",
        name="cause",
        right=f"The lab's own sentence: `{_second.why}`.",
        hints=(
            "the same model runs the same ops in the same mode. What is left?",
            "the first line has 21 letters, the second one 9.",
            "`f32[21]` and `f32[9]` have the same dtype, and not the same ...",
        ),
        record="p.trace.compiles[1].why",
    )
    the_cause
    return (the_cause,)


@app.cell(hide_code=True)
def _(before, cause):
    mo.accordion({"Look: every miss, and why": before.profile.cache}) if cause is not ... else None
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 6.3 · One shape for all

    Causal attention never looks to the right. So letters may be added at the end of a line without a change to what the
    model says before them, as long as those places do not count.

    Do: from `ids`, int64[1,n] on the CPU, make what the model reads and what should follow, both int64[1,length] on the
    CPU. Unpadded they are `ids[:, :-1]` and `ids[:, 1:]`. Where there is no letter, what follows is -100.
    """)
    return


@app.cell
def _():
    def pad(ids, length):
        return ...  # yours: read, follow

    return (pad,)


@app.cell(hide_code=True)
def _(before, letters, model, pad):
    def _padded(model):
        return [nats(model, *pad(ids, 48)) for ids in letters]

    def _test(tried):
        for ids, mine, plain in zip(letters, tried.value, before.value, strict=False):
            read, follow = pad(ids, 48)
            for name, part in (("read", read), ("follow", follow)):
                if tuple(part.shape) != (1, 48):
                    return f"`{name}` of a line of {ids.shape[1]} letters is {list(part.shape)}, not [1, 48]."
                if part.device.type != "cpu":
                    return f"`{name}` is on `{part.device}`: padding there makes a program for each length."
            counted = int((follow != -100).sum())
            if counted != ids.shape[1] - 1:
                return f"of a line of {ids.shape[1]} letters, {counted} places count, not {ids.shape[1] - 1}."
            if not abs(mine - plain) <= 1e-3 * abs(plain):
                return f"a line that cost {plain:.2f} nats costs {mine:.2f} when it is padded."
        return None

    one_shape = sheet.do(
        "6.3",
        check.attempt(_padded, model, shows=pad, name="pad", mode="fused", fresh=True),
        title="one shape for all",
        test=_test,
        par={"misses": 1},
        right="From 8 misses to 1.",
        why="The same nats for each line, from one program.",
        todo="Three lines are enough.",
        hints=(
            "`F.pad(t, (0, k))` adds k zeros at the end of the last dimension.",
            "how many are missing? `length` less what is there: n - 1.",
            "`F.pad(t, (0, k), value=...)` adds another number: `follow` wants it.",
        ),
    )
    one_shape
    return (one_shape,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 6.4 · A number that changes

    Decoding asks for the likeliest letter at place 0, then 1, then 2 ... Written as `logits[0, k].argmax()`, the Python
    number `k` says *where in memory* to look. It is a part of the program: 8 places, 8 misses, cause `view`.

    A tensor's **values** are never part of a key. Do: give back the same number as a tensor on the device, for any place, with 1 miss.
    """)
    return


@app.cell
def _():
    def likeliest(logits, k):
        return ...  # yours

    return (likeliest,)


@app.cell(hide_code=True)
def _(letters, likeliest, model):
    _logits = model(F.pad(letters[6], (0, 3)).to("tpu")).detach()

    def _decode(logits):
        found = []
        for k in range(8):
            place = likeliest(logits, k)
            there = isinstance(place, torch.Tensor) and place.device.type == "tpu"
            found.append((place.item() if there and place.numel() == 1 else place, there))
        return found if any(place is not None for place, _ in found) else None

    def _test(tried):
        rights = _logits[0, :8].cpu().argmax(-1).tolist()
        for k, ((mine, there), right) in enumerate(zip(tried.value, rights, strict=True)):
            tensor = isinstance(mine, torch.Tensor)
            if not there:
                said = f"a tensor on `{mine.device}`" if tensor else f"a Python `{type(mine).__name__}`"
                return f"at place {k} `likeliest` gives {said}, and a tensor on the device is asked for."
            if tensor:
                return f"at place {k} `likeliest` gives a tensor of {mine.numel()} values, and one is asked for."
            if mine != right:
                return f"at place {k} the likeliest letter is number {right}, and `likeliest` gives {mine!r}."
        again = [made for made in tried.profile.trace.compiles if made.cause == "view"]
        if len(tried.profile.trace.compiles) > 1 and again:
            return check.Disagree(
                f"{len(tried.profile.trace.compiles)} misses: `k` still says where in memory to look.",
                record="p.trace.compiles[1].why",
            )
        return None

    a_number = sheet.do(
        "6.4",
        check.attempt(_decode, _logits, shows=likeliest, name="likeliest", mode="fused", fresh=True),
        title="a number that changes",
        test=_test,
        par={"misses": 1},
        ran=(),
        right="One program for all places.",
        why="Where to look is an input now.",
        todo="Two lines are enough.",
        hints=(
            "make a tensor of `k`, on the device of `logits`.",
            "`index_select(dim, index)` takes the rows that a tensor of numbers names.",
            "`logits[0]` has a row for each place: select one of them, then `argmax`.",
        ),
    )
    a_number
    return (a_number,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## 6.5 · Two buckets

    One shape for all is 1 miss, but `import os` is then worked on at the length of the longest line. Between the two ends
    are **buckets**: a few lengths, and each line is padded to the smallest that it fits in.

    Do: choose two lengths, so that two programs serve all lines with as few FLOPs as possible. Your `pad` is used. The
    lengths that the model reads are 8, 11, 14, 20, 20, 27, 33, 39 and 44.
    """)
    return


@app.cell
def _():
    buckets = ...  # yours: a tuple of two lengths
    return (buckets,)


@app.cell(hide_code=True)
def _(buckets, letters, model, one_shape, pad):
    _code = f"buckets = {buckets!r}"
    _good = isinstance(buckets, tuple | list) and len(buckets) == 2 and all(type(b) is int for b in buckets)

    def _bucketed(model):
        return [nats(model, *pad(ids, min(b for b in buckets if b >= ids.shape[1] - 1))) for ids in letters]

    if buckets is ...:
        _tried = None
    elif not _good:
        _tried = check.Attempt(
            "buckets", error="`buckets` should be a tuple of two whole numbers.", source=(_code[:80],)
        )
    elif max(buckets) not in range(44, 65):
        _tried = check.Attempt(
            "buckets", error="the longest line has to fit, and the model reads 64 letters at most.", source=(_code,)
        )
    elif not one_shape.passed:
        _tried = check.Attempt("buckets", tried=False, error="`pad` of 6.3 comes first.", source=(_code,))
    else:
        _tried = dataclasses.replace(
            check.attempt(_bucketed, model, mode="fused", fresh=True), name="buckets", source=(_code,)
        )

    two_buckets = sheet.do(
        "6.5",
        _tried,
        title="two buckets",
        name="buckets",
        par={"misses": 2, "flops": 9_725_952},  # what the answers reach: tests/test_tutorials.py holds it
        right="Two programs, and little work in vain.",
        why="More buckets are more misses and fewer FLOPs: choose by how long compiling takes, and how often you run.",
        todo="Two numbers.",
        hints=(
            "one of them has to hold the longest line; more than that is work in vain.",
            "the other one: five of the nine lines are short. What is the least that holds them?",
            "for each candidate add up the lengths after padding. A bucket one longer than a line is already too long.",
        ),
    )
    two_buckets
    return (two_buckets,)


@app.cell(hide_code=True)
def _(a_number, count_misses, one_shape, the_cause, two_buckets):
    score = sheet.show(count_misses, the_cause, one_shape, a_number, two_buckets, code=False)
    score
    return (score,)


@app.cell(hide_code=True)
def _(score):
    mo.md("""
    ## What we saw

    - A key holds shapes, never values. A new shape is a new program.
    - Padding to one length, with the added places masked, gives the same results from one program.
    - A Python number that picks a place is part of the program; a tensor is an input of it.
    - Buckets trade programs for work.

    Next: `07_roofline_and_mfu.py`, with paper and pencil.
    """) if score.passed else mo.md("When all checks tick, the summary shows here.")
    return


if __name__ == "__main__":
    app.run()
