"""Global numeric state: what a session states at its start, and what changes while it records.

`GlobalStateGuard` tells in a fraction of a microsecond whether grad mode, autocast, default dtype, determinism, threads
or TF32 changed. The settings it does not cover are looked at before the operators that they can affect only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

from replayfmt.pytorch.settings import SETTINGS, read_settings

from .records import Records

# Settings outside the guard, and the operators whose results they can change (parts of names).
_CONVOLUTION = ("conv", "mkldnn", "cudnn")
_MATRIX = ("mm", "matmul", "linear", "bilinear", "dot", "mv", "addr", "attention", "einsum", "cdist", "lstm", "gru", "rnn")
_POLLED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_CONVOLUTION + _MATRIX + ("norm",), ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")),
    (_CONVOLUTION + _MATRIX + ("norm",), ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32")),
    (_CONVOLUTION + _MATRIX, tuple(name for name in SETTINGS if name.startswith(("fp32_precision.", "cublas_", "cpu_fp16")))),
    (_CONVOLUTION + _MATRIX, ("float32_matmul_precision",)),
    (("attention", "sdp"), tuple(name for name in SETTINGS if name.startswith("sdp_"))),
    (("empty", "resize", "new_"), ("fill_uninitialized_memory",)),
    (("quantized", "fbgemm", "quantize"), ("quantized_engine",)),
)


def polled_settings(kernel: str) -> tuple[str, ...]:
    """The settings outside the guard that can change what a kernel (`aten::mm`) computes."""
    namespace, _, base = kernel.partition("::")
    if namespace not in ("aten", "prims"):
        return tuple(SETTINGS)
    names: list[str] = []
    for parts, settings in _POLLED:
        if any(part in base for part in parts):
            names += (name for name in settings if name in SETTINGS and name not in names)
    return tuple(names)


class NumericState:
    """The state that the stream is in. Callers hold the recorder's lock."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.known: dict[str, Any] = read_settings()
        self.guard = GlobalStateGuard()
        self._guarded: dict[str, tuple[str, ...]] = {}
        self._flushes = self.known.get("flush_denormal")

    def check(self, kernel: str) -> None:
        """Before an op: record what changed since the last one."""
        if not self.guard.check():
            self._compare(None)
            self.guard = GlobalStateGuard()
            return
        names = self._guarded.get(kernel)
        if names is None:
            names = self._guarded[kernel] = polled_settings(kernel)
        if names:
            self._compare(names)
        if SETTINGS["flush_denormal"].get() != self.known["flush_denormal"]:
            self._compare(("flush_denormal",))

    def _compare(self, names: tuple[str, ...] | None) -> None:
        now = read_settings(names)
        changes = {name: value for name, value in now.items() if self.known.get(name) != value}
        if changes:
            self.known.update(changes)
            self._records.global_state(changes)


def inference_or_grad() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()
