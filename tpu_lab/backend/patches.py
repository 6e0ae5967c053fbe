"""What torch assumes of a device and cannot be told through a hook: each patch with its reason."""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpu_lab.backend import (
    accelerator,
    amp,
    compile,
    executor,
    forks,
    generators,
    host,
    interrupts,
    layouts,
    modules,
    owners,
    precision,
    recorder,
    resize,
    serial,
    state,
    told,
)  # fmt: skip


def apply() -> None:
    """Install all patches. CPU and CUDA tensors keep their behaviour."""
    torch.utils.generate_methods_for_privateuse1_backend(
        for_storage=True
    )  # x.tpu(), x.is_tpu, module.tpu(), storage.tpu()
    serial.apply()
    resize.patch_storage_resize()
    modules.apply()
    forks.apply()
    accelerator.apply()
    generators.apply()
    layouts.apply()
    amp.apply()
    told.apply()
    _matmul_precision()
    _optimizer_hooks()
    _printing()
    compile.install()


def _matmul_precision() -> None:
    """torch.set_float32_matmul_precision tells CUDA and mkldnn only: tell this device, too."""
    original = torch.set_float32_matmul_precision

    @functools.wraps(original)
    def set_float32_matmul_precision(name):
        original(name)
        precision.set({"highest": None, "medium": "default"}.get(name, name))

    torch.set_float32_matmul_precision = set_float32_matmul_precision


def _optimizer_hooks() -> None:
    """A loop that never reads a value would record for ever: run the deferred graph after each optimizer step.

    When there is no memory for it, the step has not been: what the optimizer made for parameters that it met for the
    first time would be lost for all later steps, so it meets them again.
    """
    from tpu_lab import trace

    met: dict[int, int] = {}  # of an optimizer at work: parameters that it has a state for, first of all in its `state`

    def before(optimizer, args, kwargs):
        interrupts.ensure()
        met[id(optimizer)] = len(optimizer.state)
        recorder.optimizer = type(optimizer).__name__
        if trace.active is not None:
            with state.lock:
                owners.before_step(optimizer)

    def after(optimizer, args, kwargs):
        recorder.optimizer = None
        known = met.pop(id(optimizer), 0)
        with state.lock:
            owners.after_step(optimizer)
            try:
                executor.flush("step end")
            except torch.OutOfMemoryError:
                for parameter in list(optimizer.state)[known:]:
                    del optimizer.state[parameter]
                raise
        if trace.active is not None:
            import time

            active = trace.active
            active.steps.append(time.perf_counter_ns())
            active.steppers.append(active.optimizers.setdefault(id(optimizer), len(active.optimizers)))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _printing() -> None:
    """Formatting a tensor runs dozens of small ops: print from one host copy."""
    original = torch._tensor_str._tensor_str

    def _tensor_str(self, indent):
        if self.device.type == "tpu" and type(self) in (torch.Tensor, torch.nn.Parameter):
            with torch.no_grad():
                self = host.to_cpu(self, "print")
        return original(self, indent)

    torch._tensor_str._tensor_str = _tensor_str
