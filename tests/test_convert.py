"""`tpu-lab convert`: the magics become plain Python, marimo finds nothing to complain about, and the notebook runs."""

import importlib.util
import subprocess
import sys

import nbformat
import pytest

from tpu_lab import Profile, cli, convert

CELLS = [
    ("markdown", "# A notebook"),
    ("code", "%load_ext tpu_lab"),
    ("code", "import torch\n\nx = torch.ones(8, 8, device='tpu')\n\ndef step(x):\n    return (x @ x).sum()"),
    ("code", "%%tpu_profile -v report --view ops,cache --mode strict\ntext = '''a\n  b'''\nloss = step(x).item()"),
    ("code", "before = loss\n%tpu_profile y = step(x)\nafter = y.item()"),
    ("code", "%tpu_profile -n 3 -w 1 last = step(x)"),
    ("code", "q = %tpu_profile -o -q z = x + 1"),
    ("code", "%%tpu_profile -n 2 -s wasted\nfor i in range(2):\n    w = x * i\n%time 1\nw.sum().item()"),
    ("raw", "no Python: ```\n\\begin{document}"),
    ("code", "q.summary, text, last"),
]


def notebook(folder, cells):
    made = nbformat.v4.new_notebook()
    kinds = {"raw": nbformat.v4.new_raw_cell, "markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    made.cells = [kinds[kind](source) for kind, source in cells]
    nbformat.write(made, folder / "nb.ipynb")
    return folder / "nb.ipynb"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    assert cli.main(["convert", str(notebook(folder, CELLS)), str(folder / "out.py")]) == 0
    return folder / "out.py"


def test_marimo_finds_nothing_to_complain_about(converted):
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", str(converted)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_and_the_names_stay(converted):
    spec = importlib.util.spec_from_file_location("converted", converted)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outputs, names = module.app.run()
    assert names["text"] == "a\n  b" and names["loss"] == names["after"] == names["last"].item() == 512.0
    assert names["report"].trace.meta["mode"] == "strict" and len(names["q"].trace.ops) == 1
    assert isinstance(names["p"], Profile) and len(names["p2"].metrics.steps) == 4
    assert names["w"].device.type == "tpu" and len(names["p3"].trace.ops) == 6
    assert [s.ops[1] - s.ops[0] for s in names["p3"].metrics.steps] == [3, 3]
    assert "begin{document}" in converted.read_text()
    shown = [o for o in outputs if o is not None]
    assert names["p2"] in shown and names["q"] not in shown


def block(source):
    (text,), imports, notes = convert.rewrite([source])
    assert not notes
    return text, imports


@pytest.mark.parametrize(
    "magic, plain",
    [
        ("%tpu_profile f(x)", "with tpu_lab.profile() as p:\n    f(x)\np"),
        ("%tpu_profile -v r f(x);", "with tpu_lab.profile() as r:\n    f(x)"),
        ("%tpu_profile --view cache f(x)", "with tpu_lab.profile() as p:\n    f(x)\np.cache"),
        ("%tpu_profile -n 5 -w 2 --mode fused y = f(x, k=1)", 'p = tpu_lab.profile(f, x, k=1, steps=5, warmup=2, mode="fused")\ny = p.value\np'),
        ("%tpu_profile -n 5 f(x, name=1)", "with tpu_lab.profile() as p:\n    for _ in range(5):\n        f(x, name=1)\n        p.step()\np"),
        ("%%tpu_profile -w 1\na = f(x)\nb = a", "for _ in range(1):  # warm-up\n    a = f(x)\n    b = a\nwith tpu_lab.profile() as p:\n    for _ in range(1):\n        a = f(x)\n        b = a\n        p.step()\np"),
        ("%tpu_profile -q --html 'my f.html' -T t.txt --json j f(x)", "with tpu_lab.profile() as p:\n    f(x)\np.to_html('my f.html')\np.to_json('j')\np.to_text('t.txt')"),
        ("%tpu_profile --chip v6e f(x)", 'with tpu_lab.profile() as p:\n    f(x)\nmo.vstack([p, p.on("v6e")])'),
        ("%tpu_profile -l 5 -s bytes --view ops f(p)", 'with tpu_lab.profile() as p2:\n    f(p)\np2.view("ops", limit=5, sort="bytes")'),
        ("if a:\n    %tpu_profile f(x)\n    b = 1", "if a:\n    with tpu_lab.profile() as p:\n        f(x)\n    mo.output.append(p)\n    b = 1"),
        ("%%tpu_profile -q\nx = f'''a\n{1}'''\n!ls", "with tpu_lab.profile() as p:\n    x = f'''a\n{1}'''\n    pass  # !ls"),
    ],
)  # fmt: skip
def test_each_option_has_its_plain_words(magic, plain):
    text, imports = block(magic)
    assert text == plain
    compile(text, "cell", "exec")
    assert imports.splitlines() == ["import tpu_lab"] + (["import marimo as mo"] if "mo." in plain else [])


def test_what_cannot_be_rewritten_is_left_and_told():
    sources = ["%%tpu_profile --nope\nx", "%%tpu_profile\nx = (", "%%tpu_profile -n 2", None, "y = 1"]
    out, imports, notes = convert.rewrite(sources)
    assert out == sources and imports == "" and len(notes) == 3
    assert notes[0] == "cell 1 is left as it is: there is no option --nope: %tpu_profile? lists them"
    assert "no code to profile" in notes[2]


def test_an_import_that_is_there_is_not_made_again():
    out, imports, _ = convert.rewrite(["import tpu_lab", "%load_ext tpu_lab\nimport os", "%tpu_profile f(p)"])
    assert out == ["import tpu_lab", "import os", "with tpu_lab.profile() as p2:\n    f(p)\np2"] and imports == ""


def test_files_that_cannot_be_read_or_are_there_already(tmp_path, capsys):
    out = tmp_path / "out.py"
    assert cli.main(["convert", str(tmp_path / "none.ipynb"), str(out)]) == 2
    (tmp_path / "bad.ipynb").write_text("[1]")
    assert cli.main(["convert", str(tmp_path / "bad.ipynb"), str(out)]) == 2
    out.write_text("mine")
    assert cli.main(["convert", str(notebook(tmp_path, CELLS[:1])), str(out)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "cannot read" in said[0] and "not a Jupyter notebook" in said[1] and "overwrite it with -f" in said[2]
    assert out.read_text() == "mine"
