"""Views made ahead of time: what is written is read, shows itself as before, and holds nothing of the machine."""

import gzip
from pathlib import Path

import pytest
from fixtures import traces

from tpu_lab.profile import Profile
from tpu_lab.viz import ahead

ROOT = Path(__file__).parent.parent
FILES = sorted(ahead.FOLDER.glob("*.json.gz"))


def test_a_view_comes_back_as_it_was(tmp_path):
    view = Profile(traces.mingpt(steps=2, layers=1)).ops
    for name in ("one", "two"):
        ahead.write(tmp_path / name, {"batch": 8}, {"ops": view, "padding": [{"held": 3}]})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back = ahead.read(tmp_path / "one")
    assert back.params == {"batch": 8} and back["padding"] == [{"held": 3}]
    assert back["ops"].html == view.html and str(back["ops"]) == str(view)
    assert back["ops"].title == view.title and list(back["ops"].rows["name"]) == list(view.rows["name"])
    assert all("/" not in file for file in back["ops"].rows["file"])


def test_another_format_says_what_to_do(tmp_path):
    file = tmp_path / "old.json.gz"
    file.write_bytes(gzip.compress(b'{"format": 0}'))
    with pytest.raises(ValueError, match="old.json.gz has format 0, this code reads 1: make it anew"):
        ahead.read(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_was_made_for_a_notebook_is_of_its_default_settings(file):
    notebook = ROOT / "notebooks" / file.name.replace(".json.gz", ".py")
    kept = ahead.read(file)
    assert kept.params == ahead.params_of(notebook), (
        f"make it anew: python -m tpu_lab.viz.ahead notebooks/{notebook.name}"
    )
    assert set(kept.made_with) == set(ahead.RELEASES) and "libtpu" in kept.words
    assert kept.words_at_first == f"{kept.words}, for what the controls start with"
    assert str(ROOT) not in gzip.decompress(file.read_bytes()).decode()


def test_params_are_read_without_running_the_notebook(tmp_path):
    (tmp_path / "n.py").write_text('def _():\n    params = {"batch": 8, "rate": 3e-3}\n    return (params,)\n')
    assert ahead.params_of(tmp_path / "n.py") == {"batch": 8, "rate": 3e-3}
    (tmp_path / "n.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="no cell with params"):
        ahead.params_of(tmp_path / "n.py")
