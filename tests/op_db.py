"""PyTorch's own op database (op_db: its samples, its errors) on device "tpu", against PyTorch's CPU kernels.

    python -m tests.op_db --full --jobs 2 --json sweep.json     everything; hours
    python -m tests.op_db                                       what the tests run
    python -m tests.op_db --dtypes float32 --forms forward      a part
    python -m tests.op_db -k fft --forms backward               entries by name
    python -m tests.op_db --from 492 --dtypes float64           the database's order, without its first 492 entries

tests/test_op_db_*.py run a bounded part of it. Known differences are in op_db_exceptions.py, each with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TORCH_TPU_TIER3_COMPILATION_CACHE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import op_db_run as forms  # noqa: E402
import torch  # noqa: E402
from op_db_run import Failure  # noqa: E402
from torch.testing._internal import common_methods_invocations  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import tpu_lab  # noqa: E402, F401
from tpu_lab.backend import dispatch, fallback, state  # noqa: E402

ALL_FORMS = (*forms.FORMS, "errors")
DTYPES = tuple("float32 float64 bfloat16 float16 int64 int32 uint8 bool complex64".split())
# What the tests run: (dtype, form, mode, samples): strict runs each op as a program of its own, fused all samples as one
PLAN = (
    ("float32", "forward", "fused", 2),
    ("float32", "inplace", "strict", 1),
    ("float32", "out", "strict", 1),
    ("float32", "errors", "strict", 2),
    ("float32", "backward", "fused", 1),
    ("bfloat16", "forward", "fused", 1),
    ("int64", "forward", "fused", 1),
)
QUICK = (("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True))  # values, not speed
# It puts the generator back, and then nobody sees that a call was random: `run` seeds each call.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
CHUNK = 120  # entries that a process of the sweep takes: PyTorch's database takes seconds to import
ENTRIES = {op.formatted_name: op for op in op_db}


def spread(items: list, budget: int, also=()) -> list[tuple[int, object]]:
    """(position, item): the first two, others evenly among the rest, and those at the positions `also`."""
    if len(items) <= budget:
        return list(enumerate(items))
    first = list(range(min(2, budget)))
    rest = budget - len(first)
    picked = first + [2 + (len(items) - 3) * (i + 1) // rest for i in range(rest)]
    return [(i, items[i]) for i in dict.fromkeys([*picked, *also]) if i < len(items)]


def _seed() -> None:
    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def samples(op, dtype, budget, requires_grad=False, also=()):
    """The entry's own samples, as many as the budget allows."""
    _seed()
    return spread(list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad, set_seed=False)), budget, also)


def possible(op, dtype) -> list[str]:
    """The forms in which PyTorch has this entry for this dtype."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    found = ["forward"]
    if op.get_inplace() is not None:
        found.append("inplace")
    if op.supports_out:
        found.append("out")
    if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
        found.append("backward")
        if op.supports_gradgrad:
            found.append("double")
    if op.error_inputs_func is not None and dtype is torch.float32:
        found.append("errors")
    return found


def check(op, dtype, form: str, mode: str = "strict", budget: int = 4, also=()) -> tuple[int, list[Failure]]:
    """(samples that ran, failures) of one form of an entry. also: positions of samples beyond the budget's.

    In fused mode all samples wait in one graph and run as one program.
    """
    word = str(dtype).removeprefix("torch.")
    before, state.compiler_options = state.compiler_options, QUICK
    try:
        with state.mode_scope(mode):
            found = list((_errors if form == "errors" else _samples)(op, dtype, form, budget, also, mode != "fused"))
    finally:
        state.compiler_options = before
    failures = [
        Failure(op.formatted_name, word, form, mode, i, *wrong, str(sample.summary())[:400]) for i, sample, wrong in found if wrong
    ]
    return len(found), failures


def _samples(op, dtype, form, budget, also, wait):
    """(position, sample, what differs) of each sample."""
    stays = forms.STAYS.get(op.name, 0)
    picked = samples(op, dtype, budget, form in ("backward", "double"), also)
    if form == "inplace":
        picked = [(i, s) for i, s in picked if not s.broadcasts_input]
    calls = [(i, s, getattr(forms, form)(op)) for i, s in picked]
    if form == "out" and picked:  # once more with `out=` of another shape, which is resized
        calls.append((*picked[0], forms.out(op, (0,))))
    got = [forms.run(call, s, "tpu", stays, wait=wait) for _, s, call in calls]
    if not wait:
        try:
            torch.tpu.synchronize()
        except Exception:  # whose was it?
            got = [forms.run(call, s, "tpu", stays) for _, s, call in calls]
    for (i, sample, call), outcome in zip(calls, got):
        want = forms.run(call, sample, "cpu", stays)
        yield i, sample, forms.judged(op.name, call, sample, want, outcome, stays)


def _errors(op, dtype, form, budget, also, wait):
    """The same for the entry's wrong calls: the type of the error counts."""
    stays = forms.STAYS.get(op.name, 0)
    call = forms.forward(op)
    _seed()
    errors = [e for e in op.error_inputs("cpu", set_seed=False) if not _huge(e.sample_input)]
    for i, error in spread(errors, budget, also):
        want = forms.run(call, error.sample_input, "cpu", stays)
        if want.error is not None:  # else it is an error of another device
            got = forms.run(call, error.sample_input, "tpu", stays)
            yield i, error.sample_input, forms.raised_as(got, type(want.error), str(want.error))


def _huge(sample) -> bool:
    """Of millions of elements, only to be refused: minutes of a test for one comparison of numbers."""
    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(t.numel() > 1 << 20 for t in leaves if isinstance(t, torch.Tensor))


def tidy() -> None:
    """Forget programs: a sweep makes tens of thousands."""
    dispatch.clear()


# --- the sweep ---------------------------------------------------------------------------------------------------------


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.op_db", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all dtypes, forms and samples, strict and fused")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--dtypes", default="", help=f"of {','.join(DTYPES)}; without it what the tests run")
    parser.add_argument("--forms", default="forward", help=f"of {','.join(ALL_FORMS)}")
    parser.add_argument("--modes", default="strict", help="of strict,debug,fused")
    parser.add_argument("--budget", type=int, default=4, metavar="N", help="samples of an entry, a dtype and a form")
    parser.add_argument("-k", dest="names", default="", metavar="TEXT[,TEXT]", help="entries whose name has a text; =name for one")
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="leave out the first N of them, in the database's order")
    parser.add_argument("--json", metavar="FILE", help="write the table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.full:
        args.dtypes, args.forms, args.modes, args.budget = ",".join(DTYPES), ",".join(ALL_FORMS), "strict,fused", 10**6
    if args.worker:
        return _work(args)
    names = [n for n in ENTRIES if _asked(n, args.names)][args.start :]
    rows = _sweep(names, args)
    failures = [f for row in rows for f in row["failures"]]
    for f in failures:
        print(Failure(**f))
    whole = sum(not row["failures"] for row in rows)
    print(f"{whole} of {len(rows)} entries whole ({sum(r['samples'] for r in rows)} samples, {sum(r['seconds'] for r in rows):.0f} s of processor time); "
          f"failures: {dict(Counter(f['kind'] for f in failures))}")  # fmt: skip
    print("on the CPU: " + ", ".join(sorted({o for r in rows for o in r["fallbacks"]})))
    return 1 if failures else 0


def _asked(name, texts) -> bool:
    texts = [t for t in texts.split(",") if t]
    return not texts or any(name == t[1:] if t.startswith("=") else t in name for t in texts)


def _row(name, args) -> dict:
    """One entry in all that is asked for."""
    op, start = ENTRIES[name], time.process_time()
    fallback._warned.clear()
    total, failures, ran = 0, [], []
    asked = [(d, f, m, args.budget) for d in args.dtypes.split(",") for f in args.forms.split(",") for m in args.modes.split(",")]
    for word, form, mode, budget in asked if args.dtypes else PLAN:
        if form in possible(op, getattr(torch, word)):
            count, found = check(op, getattr(torch, word), form, mode, budget)
            total += count
            failures += [vars(f) for f in found]
            ran.append([word, form, mode, count, len(found)])
    seconds = time.process_time() - start
    return {"entry": name, "samples": total, "seconds": round(seconds, 2), "ran": ran, "failures": failures, "fallbacks": sorted(fallback._warned)}


def _work(args) -> int:
    """Names from standard input, a row of JSON for each."""
    for i, name in enumerate(line.strip() for line in sys.stdin):
        row = json.dumps(_row(name, args))
        print(row, flush=True)
        if i % 20 == 19:
            tidy()
    return 0


def _sweep(names, args) -> list[dict]:
    """Rows of all entries, made in processes of their own: a crash costs one entry."""
    command = [sys.executable, "-W", "ignore", __file__, "--worker", "--dtypes", args.dtypes, "--forms", args.forms, "--modes", args.modes,
               "--budget", str(args.budget)]  # fmt: skip
    queue, rows, running = list(names), [], []
    while queue or running:
        while queue and len(running) < args.jobs:
            take, queue = queue[:CHUNK], queue[CHUNK:]
            running.append((take, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)))
            running[-1][1].stdin.write("\n".join(take))
            running[-1][1].stdin.close()
        take, process = running.pop(0)
        done = []
        for line in process.stdout:
            done.append(json.loads(line))
            print(f"{len(rows) + len(done)} of {len(names)} {done[-1]['entry']} {len(done[-1]['failures'])}", file=sys.stderr, flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps({"rows": rows + done}, indent=1))
        rows += done
        left = take[len(done) :]
        if process.wait() and left:
            text = f"crash: the process ended with {process.returncode}"
            failure = vars(Failure(left[0], args.dtypes, args.forms, args.modes, 0, "crash", text, ""))
            rows.append({"entry": left[0], "samples": 0, "seconds": 0, "ran": [], "failures": [failure], "fallbacks": []})
            queue = left[1:] + queue
    return sorted(rows, key=lambda r: names.index(r["entry"]))


if __name__ == "__main__":
    sys.exit(main())
