"""The disk tier of the compile cache: what one process compiled, the next one reads back. On by default.

It is jax's persistent compilation cache with a store of our own behind it. jax hands such entries to XLA as native
code, so they must be ours: the folder belongs to the user and nobody else may write it, and each entry carries a
keyed MAC (blake2b, the key in a file of mode 0600 beside it) over its key and bytes. An entry that does not verify is
deleted, counted and compiled anew. jax puts versions and compiler options into its keys; the processor's features go
into ours, as a home folder may be shared by different machines.

Switches: TPU_LAB_DISK_CACHE=0 turns it off, TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT moves it, and
TPU_LAB_DISK_CACHE_BYTES bounds it (2 GiB; the least recently used go first). A user who has set jax's own
`jax_compilation_cache_dir` keeps it: then this tier is off. Nothing is written before the first program is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import platform
import secrets
import stat
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax

LIMIT = 2 << 30  # bytes
_MAGIC = b"TPULAB1\n"
_MAC = 32  # bytes
_SUFFIX = ".program"
_STALE = 3600  # seconds after which a half-written file of a dead process is removed
tier: Store | None = None  # set by install()


@dataclass(frozen=True)
class Info:
    """The state of the disk tier. `refused` says why a folder is not used; `dropped` counts entries that did not verify."""

    folder: Path | None  # None: off
    entries: int
    bytes: int
    limit: int
    mode: str  # "0700", "" when the folder does not exist
    used: bool
    refused: str
    hits: int
    dropped: int


class Store:
    """Entries as files in one folder, with jax's cache interface: `get(key)`, `put(key, value)`. Never raises for I/O.

    Writes go to a temporary file and are renamed, so other processes see whole entries or none.
    """

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder = self._path = folder
        self.limit = limit
        self.hits = self.dropped = 0
        self.refused = ""
        self._secret: bytes | None = None
        self._total: int | None = None
        self._puts = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The value stored under `key`, or None; an entry that does not verify is deleted."""
        secret = self._ready()
        if secret is None:
            return None
        path = self._file(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC)
        value = data[head + _MAC :]
        good = data[:head] == _MAGIC and hmac.compare_digest(data[head : head + _MAC], _mac(secret, key, value))
        if not good:
            self.dropped += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.hits += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # recently used
        return value

    def put(self, key: str, value: bytes) -> None:
        """Store a value. One bigger than the limit, or a full disk, is no error: it is just not kept."""
        secret = self._ready()
        if secret is None or len(value) > self.limit:
            return
        entry = _MAGIC + _mac(secret, key, value) + value
        try:
            _write(self._file(key), entry)
        except OSError:
            return
        with self._lock:
            self._puts += 1
            if self._total is None or self._puts % 64 == 0:  # other processes write, too
                self._total = sum(size for _, size, _ in self._entries())
            else:
                self._total += len(entry)
            if self._total > self.limit:
                self._evict()

    def info(self) -> Info:
        """What is there now."""
        entries = self._entries()
        mode = f"{self.folder.stat().st_mode & 0o777:04o}" if self.folder.is_dir() else ""
        used = not self.refused and not _foreign(self.folder)
        return Info(
            self.folder, len(entries), sum(size for _, size, _ in entries), self.limit, mode, used,
            self.refused or _foreign(self.folder), self.hits, self.dropped,
        )  # fmt: skip

    def _file(self, key: str) -> Path:
        return self.folder / (hashlib.blake2b(f"{key}\0{_machine()}".encode(), digest_size=20).hexdigest() + _SUFFIX)

    def _entries(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of each entry."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as files:
            for file in files:
                with contextlib.suppress(OSError):
                    if file.name.endswith(_SUFFIX):
                        about = file.stat(follow_symlinks=False)
                        found.append((about.st_mtime, about.st_size, file.path))
                    elif file.name.endswith(".tmp") and file.stat().st_mtime < time.time() - _STALE:
                        os.unlink(file.path)
        return found

    def _evict(self) -> None:
        """Delete the least recently used entries until a tenth of the limit is free."""
        entries = sorted(self._entries())
        self._total = sum(size for _, size, _ in entries)
        for _, size, path in entries[:-1]:  # the newest stays
            if self._total <= self.limit * 0.9:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._total -= size

    def _ready(self) -> bytes | None:
        """The secret, once the folder is known to be ours; None when it is refused (said once)."""
        if self._secret is not None or self.refused:
            return self._secret
        with self._lock:
            if self._secret is None and not self.refused:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self.refused = _foreign(self.folder)
                    self._secret = None if self.refused else _secret(self.folder / "key")
                except OSError as error:
                    self.refused = f"it cannot be written ({error.strerror or error})"
                if self.refused:
                    warnings.warn(
                        f"the compile cache on disk is off: {self.folder}: {self.refused}. Programs will be compiled in "
                        "each process; TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT moves it, TPU_LAB_DISK_CACHE=0 silences this",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        return self._secret


def _foreign(folder: Path) -> str:
    """Why the folder is not to be trusted, or ""."""
    if not folder.exists():
        return ""
    about = folder.stat()
    if not stat.S_ISDIR(about.st_mode):
        return "it is not a folder"
    if hasattr(os, "getuid"):
        if about.st_uid != os.getuid():
            return f"it belongs to another user (uid {about.st_uid})"
        if about.st_mode & 0o022:
            return f"others may write it (mode {about.st_mode & 0o777:04o}; chmod 700 makes it yours)"
    return ""


def _secret(path: Path) -> bytes:
    """The folder's key, made at first use. A key that others could know or that is damaged is replaced."""
    for _ in range(8):
        try:
            about = path.lstat()
            mine = not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o077)
            if stat.S_ISREG(about.st_mode) and mine and about.st_size == _MAC:
                return path.read_bytes()
            path.unlink()
        except FileNotFoundError:
            pass
        temporary = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        _create(temporary, secrets.token_bytes(_MAC))
        try:
            os.link(temporary, path)  # fails if another process was first: its key is the one
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
        with contextlib.suppress(OSError):
            temporary.unlink()
    raise OSError(f"no key could be made in {path.parent}")


def _mac(secret: bytes, key: str, value: bytes) -> bytes:
    digest = hashlib.blake2b(key=secret, digest_size=_MAC)
    digest.update(f"{len(key)}:{key}\0{_machine()}\0".encode())
    digest.update(value)
    return digest.digest()


def _create(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _create(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


_machine_text: str | None = None


def _machine() -> str:
    """What native code depends on: the architecture and the processor's features."""
    global _machine_text
    if _machine_text is None:
        features = platform.processor()
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), features)
        _machine_text = f"{platform.system()} {platform.machine()} {features.strip()}"
    return _machine_text


def folder() -> Path | None:
    """Where the disk tier is or would be; None when it is off."""
    return tier.folder if tier is not None else None


def info() -> Info:
    """The state of the disk tier, for the doctor."""
    return tier.info() if tier is not None else Info(None, 0, 0, 0, "", False, "", 0, 0)


def _default_folder() -> Path:
    root = os.environ.get("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT")
    if root:
        return Path(root).expanduser() / "tpu_lab"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "tpu_lab"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tpu_lab"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "tpu_lab" / "Cache"
    return Path.home() / ".cache" / "tpu_lab"


def _limit() -> int:
    text = os.environ.get("TPU_LAB_DISK_CACHE_BYTES", "")
    if text and not text.isdigit():
        warnings.warn(f"TPU_LAB_DISK_CACHE_BYTES={text!r} is no number of bytes: {LIMIT} is used", RuntimeWarning, stacklevel=3)
    return int(text) if text.isdigit() else LIMIT


def install() -> None:
    """Put the store behind jax's persistent cache. Called once, when the device is registered; imports and writes little."""
    global tier
    if os.environ.get("TPU_LAB_DISK_CACHE", "1").strip().lower() in ("0", "false", "off", "no"):
        return
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return  # the user's own choice for all of jax
    try:
        store = Store(_default_folder(), _limit())
    except RuntimeError:  # no home folder
        return
    if not _behind_jax(store):
        # jax's internals are not as we know them: its plain file cache, in our folder if that is safe
        if store._ready() is None:
            return
    tier = store
    jax.config.update("jax_compilation_cache_dir", str(store.folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _behind_jax(store: Store) -> bool:
    """Make jax use our store for our folder; False if jax has no such place any more."""
    try:
        from jax._src import compilation_cache

        original = compilation_cache.get_file_cache
    except (ImportError, AttributeError):
        return False

    def get_file_cache(path):
        return (store, path) if str(path) == str(store.folder) else original(path)

    compilation_cache.get_file_cache = get_file_cache
    return True
