"""The notebooks as modules, and small parameters for each, with which a test of it is short."""

import functools
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = {
    "hello": {"device": "tpu", "rows": 16, "look": 4},
    "your_model": {"device": "tpu", "chip": "v6e", "example": "a table of words", "code": None, "shape": "i64[2, 3]"},
    "modes": {
        "device": "tpu",
        "chip": "v6e",
        "modes": ["strict", "fused", "compiled"],
        "width": 16,
        "layers": 1,
        "batch": 16,
        "steps": 1,
    },
    "mingpt": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "dtype": "float32",
        "batch": 4,
        "block": 16,
        "layers": 1,
        "width": 32,
        "rate": 1e-2,
        "steps": 12,
        "longer": 24,
        "reach": 4.0,
        "letters": 20,
        "lengths": [8, 16],
        "read": 6,
        "places": 16,
    },
    "resnet": {
        "device": "tpu",
        "chip": "v6e",
        "channels": 4,
        "batch": 64,
        "steps": 6,
        "epochs": 1,
        "rate": 1e-2,
        "accuracy": 0.15,
    },
    "dlrm": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "batch": 64,
        "width": 4,
        "rows": 7,
        "joined": False,
        "steps": 5,
        "rate": 1e-2,
        "apart": 2,
        "longer": 12,
        "better": -1.0,
    },
    "unet": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "sizes": 2,
        "bucket": 32,
        "width": 8,
        "batch": 1,
        "rate": 1e-2,
        "image": 16,
        "steps": 1,
        "better": -20.0,
    },
}


@functools.cache
def load(name):
    spec = importlib.util.spec_from_file_location(f"notebook_{name}", ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # marimo finds the source of a class through it
    spec.loader.exec_module(module)
    return module
