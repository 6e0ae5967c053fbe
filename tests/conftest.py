"""What every test gets: the CPU, cold private caches, nothing written outside the clone and a temporary folder."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before anything imports torch, jax or marimo; child processes inherit it.
_home = Path(tempfile.mkdtemp(prefix="tpu-lab-tests-"))
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = str(_home / "programs")
# Playwright looks for its own browsers under XDG_CACHE_HOME: keep the true place known to it.
_browsers = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ms-playwright"
if _browsers.exists():
    os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", str(_browsers))
for _name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "MPLCONFIGDIR", "IPYTHONDIR"):
    os.environ[_name] = str(_home / _name.lower())
for _name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "TORCHINDUCTOR_CACHE_DIR"):
    os.environ[_name] = str(_home / _name.lower())
os.environ["MPLBACKEND"] = "Agg"

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C: tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Random tests draw the same examples each time; HYPOTHESIS_PROFILE=search draws others, and many more.
_rest = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # compiling takes what it takes
_rest["phases"] = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # the shortest program explains itself
settings.register_profile("same", max_examples=100, derandomize=True, database=None, **_rest)
settings.register_profile("search", max_examples=3000, print_blob=True, **_rest)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return ROOT


# Two workers take a file each, in this order: a long file that began last would keep one of them waiting.
LONG = (
    "browser/test_showcases.py", "test_rerun.py", "test_stated.py", "test_showcase_models.py", "test_notebooks.py", "browser/test_modes_and_your_model.py",
    "test_training.py", "browser/test_lab.py", "test_tutorials.py", "test_twins.py", "test_lowerings_rows.py",
    "test_hub_models.py", "test_hub_generate.py", "test_hub_libraries.py", "test_signals.py", "test_errors_in_hooks.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {f"tests/{name}": n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONG)))


# --- which test exercises which op: see op_record.py -------------------------------------------------------------------

if os.environ.get("TPU_LAB_OPS"):
    import op_record

    def pytest_collection_finish(session):
        op_record.watch_device()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item, call):
        report = (yield).get_result()
        if report.when == "call":
            test = item.nodeid.split("[")[0].removeprefix("tests/")
            op_record.passed(test) if report.passed else op_record.pending.clear()

    def pytest_sessionfinish(session):
        op_record.write()
