"""The console script `tpu-lab`.

`import tpu_lab` registers a PyTorch device: seconds of imports, and it may be the very thing that is broken. The
commands that never touch the device in their own process run without it, so `tpu-lab doctor` can always speak.
"""

import importlib.util
import sys
import types

WITHOUT_DEVICE = {"open", "convert", "doctor", "twins", "recorded", "wheelhouse", "version", "-h", "--help", "--version"}


def main() -> int:
    """Run tpu_lab.cli.main on the command line's arguments; gives the exit code."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in WITHOUT_DEVICE:
        spec = importlib.util.find_spec("tpu_lab")  # finds the package, does not run its __init__
        if spec is not None and "tpu_lab" not in sys.modules:
            package = types.ModuleType("tpu_lab")
            package.__path__ = list(spec.submodule_search_locations or [])
            sys.modules["tpu_lab"] = package
    from tpu_lab.cli import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
