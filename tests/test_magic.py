"""%tpu_profile and %%tpu_profile in a real InteractiveShell."""

import ast
import inspect

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from tpu_lab import magic, options
from tpu_lab.profile import VIEWS, Profile


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "tpu_lab")
    shell.run_cell("import torch, tpu_lab\nx = torch.ones(8, 8, device='tpu')")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def shown(monkeypatch):
    """What the magics display."""
    out = []
    monkeypatch.setattr("tpu_lab.magic.display", out.append)
    return out


def run(shell, code):
    result = shell.run_cell(code)
    result.raise_error()
    return result.result


def test_line_magic_runs_once_and_names_stay(shell, shown):
    run(shell, "n = 0")
    assert run(shell, "%tpu_profile n += 1; y = (x @ x).sum().item()") is None
    assert shell.user_ns["n"] == 1 and shell.user_ns["y"] == 512.0
    assert [v.name for v in shown] == ["summary"] and "ops run as" in shown[0].title


def test_cell_magic_with_steps_store_and_mode(shell, shown):
    run(
        shell,
        "%%tpu_profile -n 3 -w 2 -v p --mode fused --view ops,cache\nz = x - 1\ndef f():\n    return z\nw = f().sum().item()",
    )
    p = shell.user_ns["p"]
    assert isinstance(p, Profile) and len(p.metrics.steps) == 5 and p.trace.meta["mode"] == "fused"
    assert shell.user_ns["w"] == 0.0 and callable(shell.user_ns["f"])
    assert [v.name for v in shown] == ["ops", "cache"]
    assert p.trace.ops[0].line == 1 and p.trace.ops[0].code == "z = x - 1"


def test_output_is_returned_not_shown_twice(shell, shown):
    assert isinstance(run(shell, "%tpu_profile -o x + 1"), Profile)
    assert shown == []
    run(shell, "q = %tpu_profile -o -q x + 1")
    assert isinstance(shell.user_ns["q"], Profile)


@pytest.mark.parametrize(
    "code",
    ["%tpu_profile x + 1;", "%tpu_profile -q x + 1", "%%tpu_profile\nx + 1;", "%tpu_profile -o x + 1;",
     "%%tpu_profile\nif True:\n    x + 1;  # said once", "%%tpu_profile\n%env SAID=it's\nx + 1;"],
)  # fmt: skip
def test_silence(shell, shown, code):
    assert run(shell, code) is None
    assert shown == []


def test_an_exception_goes_on_after_the_report(shell, shown):
    result = shell.run_cell("%%tpu_profile -v broken\nx + 1\nalready = 5\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert len(shown) == 1 and "stopped by ZeroDivisionError" in str(shown[0])
    assert shell.user_ns["already"] == 5 and len(shell.user_ns["broken"].trace.ops) == 1


def test_local_scope(shell, shown):
    run(
        shell,
        "def inside():\n    a = x * 3\n    get_ipython().run_line_magic('tpu_profile', 'a.sum().item()')\n    return 7\nr = inside()",
    )
    assert shell.user_ns["r"] == 7 and len(shown) == 1


def test_no_variable_is_expanded(shell, shown):
    run(shell, "%tpu_profile s = '{n} $n'")
    assert shell.user_ns["s"] == "{n} $n"


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("--bogus x", "no option --bogus"),
        ("-n 0 x", "at least 1 step"),
        ("-n three x", "invalid int value"),
        ("--mode fast x", "invalid choice"),
        ("--view fusion x", "no view 'fusion'"),
        ("--chip v9 x", "choose v4, v5e, v5p, v6e, v7x"),
        ("-s wasted --view ops x", "ops cannot be sorted by wasted: add --view summary or cache"),
        ("-s fast x", "invalid choice"),
        ("-l 0 x", "at least 1 row"),
        ("-T 'open x", "a quote is not closed"),
        ("-v 1a x", "wants a name"),
        ("-n 2", "needs a statement"),
    ],
)
def test_bad_options_are_one_sentence_and_run_nothing(shell, shown, line, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        shell.run_line_magic("tpu_profile", line)
    assert "\n" not in str(caught.value)
    assert shown == []


def test_code_on_a_cell_magics_first_line_is_refused(shell):
    with pytest.raises(UsageError, match="put the code below"):
        shell.run_cell_magic("tpu_profile", "-n 2 f(x)", "x + 1")


def test_options_end_where_code_begins():
    takes = options.takes_value(options.magic_parser())
    assert options.split("-n 3 f(x - 1, '-n')", takes) == ("-n 3", "f(x - 1, '-n')")
    assert options.split("-n3 --mode=fused -q y = -x", takes) == ("-n3 --mode=fused -q", "y = -x")
    assert options.split("-1 * x", takes) == ("", "-1 * x")
    assert options.split("-- -x", takes) == ("", "-x")
    assert options.split("-T 'my file.txt' f('a b')", takes) == ("-T 'my file.txt'", "f('a b')")


def test_files(shell, shown, tmp_path):
    flags = f"-T {tmp_path}/a.txt --html {tmp_path}/a.html --trace {tmp_path}/t.json --csv {tmp_path}/a.csv"
    run(shell, f"%tpu_profile -q -s time -l 2 {flags} --json {tmp_path}/a.json (x @ x).sum().item()")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.csv", "a.html", "a.json", "a.txt", "t.json"]
    assert len(Profile.from_json(tmp_path / "a.json").trace.ops) == 2
    assert "ops run as" in (tmp_path / "a.txt").read_text(encoding="utf-8")


def test_the_question_mark_prints_usage_and_examples(shell, capsys):
    run(shell, "%tpu_profile?")
    text = capsys.readouterr().out
    for word in ("%tpu_profile [-n N]", "Examples", "%%tpu_profile -v p", *VIEWS):
        assert word in text
    for flags, _ in options.MAGIC:
        assert flags[-1] in text


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_can_be_asked_for_and_knows_the_orders_it_names(shell, shown, name):
    run(shell, f"%tpu_profile -q -v p --view {name} (x @ x).relu().sum().item()")
    run(shell, f"%tpu_profile --view {name} -l 3 (x @ x).relu().sum().item()")
    assert [v.name for v in shown] == [name]
    for order in Profile.orders(name):
        assert str(shell.user_ns["p"].view(name, 3, order))


@pytest.mark.parametrize(
    "code, said",
    [
        ("%%tpu_profile\ny = x +\n", "%%tpu_profile: invalid syntax in line 1\n    y = x +\n           ^"),
        ("%tpu_profile x +", "%tpu_profile: invalid syntax in line 1"),
        ("%%tpu_profile\ny = 1\nreturn y", "%%tpu_profile: 'return' outside function in line 2"),
        ("%%tpu_profile\nimport asyncio\nawait asyncio.sleep(0)", "%%tpu_profile cannot await. A block can: with tpu_lab.profile() as p: await"),
        ("%%tpu_profile\nasync with x: pass", "%%tpu_profile cannot await"),
    ],
)  # fmt: skip
def test_code_that_cannot_run_is_told_without_a_traceback(shell, shown, capsys, code, said):
    result = shell.run_cell(code)
    assert isinstance(result.error_in_exec, UsageError) and not shown
    assert str(result.error_in_exec).startswith(said)
    assert "File" not in capsys.readouterr().err


def test_a_block_awaits_as_the_way_out_says(shell):
    run(shell, "import asyncio\nwith tpu_lab.profile() as p:\n    await asyncio.sleep(0)\n    x + 1")
    assert len(shell.user_ns["p"].trace.ops) == 1


@pytest.mark.parametrize("code", ["%%tpu_profile -q -n 2\ny = x + 1\ny.view(3)", "%tpu_profile -q x.view(3)"])
def test_a_traceback_goes_from_the_cell_to_the_code(shell, capsys, code):
    assert isinstance(shell.run_cell(code).error_in_exec, RuntimeError)
    said = capsys.readouterr()
    trail = said.out + said.err
    assert "view(3)" in trail and "magic.py" not in trail and "session.py" not in trail


def test_it_asks_for_what_the_ipython_of_colab_has():
    """Colab stays at IPython 7.34: a name that came later would take the magics away there."""
    there = {
        "UsageError", "Magics", "line_cell_magic", "magics_class", "needs_local_scope", "no_var_expand", "argument",
        "magic_arguments", "parse_argstring", "display",
    }  # fmt: skip
    tree = ast.parse(inspect.getsource(magic))
    modules = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("IPython")
    ]
    assert {alias.name for node in modules for alias in node.names} == there
