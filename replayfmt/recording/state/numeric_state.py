"""Global numeric state: what a session states at its start, and what changes while it records.

`GlobalStateGuard` tells in a fraction of a microsecond whether grad mode, autocast, default dtype, determinism, threads
or TF32 changed. The settings it does not cover are looked at before the operators that they can affect only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

from replayfmt.pytorch.settings import guarded, read_settings

from ..stream.records import Records

_SMALLEST, _HALF = sys.float_info.min, 0.5  # their product is a denormal, unless the processor flushes those to zero

# What decides numerics outside the guard, as torch resolves it (a precision not set follows a wider one), by the
# operators that it can affect (parts of their names). CUDA's own matter only where there is CUDA.
_MATRIX = ("mm", "matmul", "linear", "dot", "mv", "addr", "attention", "addb", "cdist")
_CONVOLUTION = ("conv",)
_RECURRENT = ("lstm", "gru", "rnn")
_MKLDNN = _MATRIX + _CONVOLUTION + _RECURRENT + ("mkldnn",)
_Affected = tuple[str, ...]


def _precision(backend: str, operation: str) -> Callable[[], Any]:
    return partial(getattr(torch._C, "_get_fp32_precision_getter", _unknown), backend, operation)


def _unknown(*_: Any) -> None:
    """Stands for a setting that this build does not have."""


def _getter(name: str) -> Callable[[], Any]:
    return getattr(torch._C, name, _unknown)


_WATCHED: tuple[tuple[_Affected, Callable[[], Any]], ...] = (
    (_MKLDNN, _getter("_get_mkldnn_enabled")),
    (_CONVOLUTION + _RECURRENT, _getter("_get_mkldnn_deterministic")),
    (_CONVOLUTION, _getter("_get_nnpack_enabled")),
    (_MATRIX, _precision("mkldnn", "matmul")),
    (_CONVOLUTION, _precision("mkldnn", "conv")),
    (_RECURRENT, _precision("mkldnn", "rnn")),
    (_MATRIX, _getter("_get_cpu_allow_fp16_reduced_precision_reduction")),
    (("sdp",), _getter("_get_flash_sdp_enabled")),
    (("sdp",), _getter("_get_mem_efficient_sdp_enabled")),
    (("sdp",), _getter("_get_math_sdp_enabled")),
    (("sdp",), _getter("_get_cudnn_sdp_enabled")),
    (("sdp",), _getter("_get_math_sdp_allow_fp16_bf16_reduction")),
    (("empty", "resize"), _getter("_get_deterministic_fill_uninitialized_memory")),
    (("quantize", "fbgemm"), _getter("_get_qengine")),
)
_WATCHED_CUDA: tuple[tuple[_Affected, Callable[[], Any]], ...] = (
    (_MATRIX, _precision("cuda", "matmul")),
    (_CONVOLUTION, _precision("cuda", "conv")),
    (_RECURRENT, _precision("cuda", "rnn")),
    (_MATRIX, _getter("_get_cublas_allow_fp16_reduced_precision_reduction")),
    (_MATRIX, _getter("_get_cublas_allow_bf16_reduced_precision_reduction")),
    (_MATRIX, _getter("_get_cublas_allow_fp16_accumulation")),
    (_CONVOLUTION + _RECURRENT + ("batch_norm", "cudnn"), _getter("_get_cudnn_enabled")),
    (_CONVOLUTION + ("batch_norm", "cudnn"), _getter("_get_cudnn_benchmark")),
    (_CONVOLUTION + _RECURRENT + ("batch_norm", "cudnn"), _getter("_get_cudnn_deterministic")),
)


WATCHED = _WATCHED + _WATCHED_CUDA  # their numbers are known to native/session.h


def watched_indices(kernel: str) -> tuple[int, ...]:
    """What to look at before a call of a kernel (`aten::mm`), beside the guard: indices into WATCHED. A custom one may
    depend on anything."""
    namespace, _, base = kernel.partition("::")
    watched = len(WATCHED) if torch.cuda.is_available() else len(_WATCHED)
    return tuple(
        index
        for index, (affected, _get) in enumerate(WATCHED[:watched])
        if namespace != "aten" or any(part in base for part in affected)
    )


class NumericState:
    """The state that the stream is in. Callers hold the recorder's lock."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.stated: dict[str, Any] = read_settings()
        self._watches: dict[str, tuple[int, ...]] = {}  # watched_indices of the kernels that were seen
        self.restated: Callable[[], None] = lambda: None  # called when the stream states all settings as they are
        self._look()

    def _look(self) -> None:
        """What is set now is what the stream states."""
        with torch._C._EnableTorchFunction():  # the guard covers it, and the recorder looks with and without
            self._unchanged = GlobalStateGuard().check
        self._watched = [guarded(get) for _affected, get in WATCHED]
        self._flushes = _flushes_denormals()

    def differs(self, kernel: str) -> bool:
        """Whether a setting that an op of a kernel would run under now is not what the stream says."""
        watches = self._watches.get(kernel)
        if watches is None:
            watches = self._watches[kernel] = watched_indices(kernel)
        with torch._C._EnableTorchFunction():
            unchanged = self._unchanged()
        return (
            not unchanged
            or _flushes_denormals() != self._flushes
            or any(guarded(WATCHED[index][1]) != self._watched[index] for index in watches)
        )

    def moved(self, kernel: str, autocast: dict[str, str] | None) -> bool:
        """Whether an op that is about to run would have other settings stated before it. `autocast`: the program's,
        where the op may depend on it."""
        now = read_settings() if self.differs(kernel) else {}
        settings = {name: value for name, value in now.items() if not name.startswith("autocast.")} | (autocast or {})
        return any(self.stated.get(name) != value for name, value in settings.items())

    def check(self, kernel: str) -> None:
        """Before an op: record what changed since the last one."""
        if not self.differs(kernel):
            return
        self._state(read_settings())
        self._look()
        self.restated()

    def check_autocast(self, now: dict[str, str]) -> None:
        """Before a custom operator, whose own code may depend on it: the program's autocast. (To everything else, which
        was cast before, it reads as off.)"""
        self._state(now)

    def _state(self, now: dict[str, Any]) -> None:
        """Record what of some settings is not as the stream has it."""
        changes = {name: value for name, value in now.items() if self.stated.get(name) != value}
        if changes:
            self.stated.update(changes)
            self._records.global_state(changes)


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic flushes denormals to zero."""
    return _SMALLEST * _HALF == 0.0
