"""The disk tier: a second process compiles nothing, and nothing that is not ours reaches XLA."""

import json
import os
import stat
import subprocess
import sys
import textwrap
import warnings

import jax
import pytest

from tpu_lab.backend import cache, disk

STEP = textwrap.dedent("""
    import json, torch
    import tpu_lab
    from tpu_lab.backend import disk
    from tpu_lab.backend.cache import cache
    torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4).to("tpu")
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    info = disk.info()
    print(json.dumps({"losses": losses, "tiers": [p.tier for p in cache.programs.values()], "used": info.used,
                      "dropped": info.dropped, "entries": info.entries, "hlo": "ENTRY" in next(iter(cache.programs.values())).hlo()}))
""")


def run(root, **env):
    env = {**os.environ, "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str(root), **env}
    done = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_process_compiles_nothing_and_a_damaged_entry_is_dropped(tmp_path):
    first, _ = run(tmp_path)
    assert set(first["tiers"]) == {"compiled"} and first["used"]
    second, errors = run(tmp_path)
    assert set(second["tiers"]) == {"disk"} and second["losses"] == first["losses"] and second["hlo"]
    assert errors == ""  # XLA says nothing about reloaded programs
    folder = tmp_path / "tpu_lab"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    biggest = max(folder.glob("*.program"), key=lambda p: p.stat().st_size)
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(data)
    third, _ = run(tmp_path)
    assert third["dropped"] == 1 and third["tiers"].count("compiled") == 1 and third["losses"] == first["losses"]
    assert third["entries"] == first["entries"]  # compiled anew and stored again


def test_the_switch_turns_it_off(tmp_path):
    off, _ = run(tmp_path, TPU_LAB_DISK_CACHE="0")
    assert set(off["tiers"]) == {"compiled"} and not off["used"] and off["entries"] == 0
    assert list(tmp_path.iterdir()) == []


def test_entries_are_bound_to_their_key_and_to_the_folder(tmp_path):
    store = disk.Store(tmp_path / "a")
    store.put("one", b"program one")
    store.put("two", b"program two")
    assert store.get("one") == b"program one" and store.get("three") is None
    os.replace(store._file("two"), store._file("one"))  # a true entry under another key
    assert store.get("one") is None and store.dropped == 1 and not store._file("one").exists()
    other = disk.Store(tmp_path / "b")
    other.put("one", b"foreign")
    os.replace(other._file("one"), store._file("one"))  # an entry of another folder
    assert store.get("one") is None and store.dropped == 2
    store._file("one").write_bytes(b"")
    assert store.get("one") is None and store.dropped == 3
    store.put("one", b"again")
    assert disk.Store(tmp_path / "a").get("one") == b"again"  # as another process sees it


def test_a_lost_or_open_key_makes_the_entries_worthless(tmp_path):
    store = disk.Store(tmp_path)
    store.put("one", b"program")
    os.chmod(tmp_path / "key", 0o644)
    again = disk.Store(tmp_path)
    assert again.get("one") is None and again.dropped == 1
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_is_refused_with_one_warning(tmp_path, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chmod(folder, mode)
    store = disk.Store(folder)
    with pytest.warns(RuntimeWarning, match="others may write it.*TPU_LAB_DISK_CACHE=0"):
        store.put("one", b"program")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("one") is None
    assert list(folder.iterdir()) == [] and not store.info().used and "others" in store.info().refused


def test_a_folder_of_another_user_or_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    store = disk.Store(tmp_path)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert store.get("one") is None
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="compile cache on disk is off"):
        disk.Store(tmp_path / "file").put("one", b"program")


def test_the_size_is_bounded_and_the_least_recently_used_go_first(tmp_path):
    store = disk.Store(tmp_path, limit=10_000)
    for i in range(9):
        store.put(f"k{i}", bytes(1000))
        os.utime(store._file(f"k{i}"), (i, i))  # a clear order whatever the clock's resolution
    assert store.get("k0") is not None  # just used: now the newest
    store.put("k9", bytes(1000))
    info = store.info()
    assert info.bytes <= 10_000 and info.limit == 10_000
    assert store.get("k1") is None and store.get("k0") is not None and store.get("k9") is not None
    store.put("huge", bytes(20_000))
    assert store.get("huge") is None


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", str(tmp_path))
    assert disk._default_folder() == tmp_path / "tpu_lab"
    monkeypatch.delenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk._default_folder() == tmp_path / "xdg" / "tpu_lab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert disk._default_folder() == tmp_path / "Library" / "Caches" / "tpu_lab"
    monkeypatch.setattr(sys, "platform", "linux")
    assert disk._default_folder() == tmp_path / ".cache" / "tpu_lab"


def test_the_limit_variable(monkeypatch):
    monkeypatch.setenv("TPU_LAB_DISK_CACHE_BYTES", "5000")
    assert disk._limit() == 5000
    monkeypatch.setenv("TPU_LAB_DISK_CACHE_BYTES", "much")
    with pytest.warns(RuntimeWarning, match="no number of bytes"):
        assert disk._limit() == disk.LIMIT


def test_this_process_uses_it():
    assert disk.folder() is not None and jax.config.jax_compilation_cache_dir == str(disk.folder())
    assert isinstance(disk.info().bytes, int) and cache.cache.stats()["disk_hits"] >= 0
