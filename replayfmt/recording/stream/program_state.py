"""State of the program that results depend on besides tensors: global numeric settings, and random generators.

A session states the settings at its start; what changes while it records is a record of its own. A generator's state
must be recorded before an op draws from it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

from replayfmt.format.model import Generator
from replayfmt.pytorch.accelerators import default_generator, is_accelerator
from replayfmt.pytorch.collectives import NAMESPACE as COLLECTIVE_RECORDS
from replayfmt.pytorch.environment import guarded, read_settings
from replayfmt.pytorch.tensors.memory import call_undispatched, host_view

from .buffer import RecordBuffer
from .records import Records
from .session import Session

_SMALLEST, _HALF = sys.float_info.min, 0.5  # their product is a denormal, unless the processor flushes those to zero

# The numeric settings outside the guard, as torch resolves them (an unset precision follows a more general one), by the
# operators that they can affect (parts of their names). CUDA's settings matter only if PyTorch was built with it.
_MATRIX = ("mm", "matmul", "linear", "dot", "mv", "addr", "attention", "addb", "cdist")
_CONVOLUTION = ("conv",)
_RECURRENT = ("lstm", "gru", "rnn")
_LINALG = ("linalg", "cholesky", "svd", "lu_", "_lu", "qr", "eig", "inverse", "lstsq", "ormqr", "triangular_solve")
_MKLDNN = _MATRIX + _CONVOLUTION + _RECURRENT + ("mkldnn",)
_Affected = tuple[str, ...]


def _precision(backend: str, operation: str) -> Callable[[], Any]:
    return partial(getattr(torch._C, "_get_fp32_precision_getter", _unknown), backend, operation)


def _unknown(*_: Any) -> None:
    """The getter of a setting that this build does not have."""


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
    (_MATRIX, _getter("_get_blas_preferred_backend")),
    (_LINALG, _getter("_get_linalg_preferred_backend")),
)


WATCHED = _WATCHED + _WATCHED_CUDA  # native/session.h relies on these indices


@functools.cache
def watched_indices(kernel: str) -> tuple[int, ...]:
    """The settings to check before a call of a kernel (`aten::mm`), besides the guard, as indices into WATCHED. A
    custom kernel may depend on anything; those of a collective compute nothing."""
    namespace, _, base = kernel.partition("::")
    if namespace == COLLECTIVE_RECORDS:
        return ()
    watched = len(WATCHED) if torch.backends.cuda.is_built() else len(_WATCHED)
    return tuple(
        index
        for index, (affected, _get) in enumerate(WATCHED[:watched])
        if namespace != "aten" or any(part in base for part in affected)
    )


class NumericState:
    """The state that the stream has recorded. Callers hold the recorder's lock.

    Programs change the grad mode all the time, so it is looked at apart from the rest.
    """

    def __init__(self, records: Records, session: Session) -> None:
        """`session` knows the grad mode that the stream states."""
        self._records = records
        self._session = session
        session.grad_mode = torch.is_grad_enabled()
        self.stated: dict[str, Any] = read_settings()
        self._watches: dict[str, tuple[int, ...]] = {}  # watched_indices of the kernels seen
        self._unchanged_in: dict[bool, Callable[[], bool]] = {}  # in each grad mode, whether nothing else has changed
        self._look()
        session.settle()

    def _look(self) -> None:
        """Take the current settings as what the stream states."""
        mode = torch.is_grad_enabled()
        try:
            for each in (not mode, mode):
                torch._C._set_grad_enabled(each)
                with torch._C._EnableTorchFunction():  # the guard covers it, and the recorder looks with and without
                    self._unchanged_in[each] = GlobalStateGuard().check
        finally:
            torch._C._set_grad_enabled(mode)
        self._watched = [guarded(get) for _affected, get in WATCHED]
        self._flushes = _flushes_denormals()

    def differs(self, kernel: str) -> bool:
        """Whether a setting that an op of a kernel would run under now differs from the stream's, apart from the grad
        mode."""
        watches = self._watches.get(kernel)
        if watches is None:
            watches = self._watches[kernel] = watched_indices(kernel)
        with torch._C._EnableTorchFunction():
            unchanged = self._unchanged_in[torch.is_grad_enabled()]()
        return (
            not unchanged
            or _flushes_denormals() != self._flushes
            or any(guarded(WATCHED[index][1]) != self._watched[index] for index in watches)
        )

    def moved(self, kernel: str, autocast: dict[str, str] | None) -> bool:
        """Whether changed settings would have to be recorded before an op that is about to run. `autocast`: the
        program's, if the op may depend on it."""
        now = read_settings() if self._grad_mode() is not torch.is_grad_enabled() or self.differs(kernel) else {}
        settings = {name: value for name, value in now.items() if not name.startswith("autocast.")} | (autocast or {})
        return any(self.stated.get(name) != value for name, value in settings.items())

    def check(self, kernel: str) -> None:
        """Before an op: record what changed since the last one."""
        if self._grad_mode() is not torch.is_grad_enabled():
            self._records.grad_mode(self._session)
            self.stated["grad_enabled"] = torch.is_grad_enabled()
        if not self.differs(kernel):
            return
        self._session.unsettle()
        self._state(read_settings())
        self._look()
        self._session.settle()

    def _grad_mode(self) -> bool:
        """The one that the stream states."""
        mode = self.stated["grad_enabled"] = self._session.grad_mode
        return mode

    def check_autocast(self, now: dict[str, str]) -> None:
        """Before a custom operator, whose own code may depend on it: record the program's autocast if it changed. (For
        all other operators, which were cast before, it reads as off.)"""
        self._state(now)

    def _state(self, now: dict[str, Any]) -> None:
        """Record those of some settings that differ from the stream's."""
        changes = {name: value for name, value in now.items() if self.stated.get(name) != value}
        if changes:
            self.stated.update(changes)
            self._records.global_state(changes)


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic flushes denormals to zero."""
    return _SMALLEST * _HALF == 0.0


_REMEMBERED = 4096  # generators; if a program makes more, the oldest get new ids


class _RecordedGenerator:
    """`session`: the capture's, if ops on the hot path draw from it."""

    __slots__ = ("expected", "number", "session")

    def __init__(self, number: int, session: Session | None) -> None:
        self.number = number
        self.session = session
        self.expected: bytes | None = None  # the state that a replay's will be in, as far as the complete path knows

    def replayed(self) -> bytes | None:
        """The state that a replay's generator will be in. Where the hot path draws, it knows: `expected` may be one
        that its draws have left since, and that the program has gone back to."""
        drawn = None if self.session is None else call_undispatched(self.session.drawn_state)
        return self.expected if drawn is None else call_undispatched(_bytes_of, drawn)


class Generators:
    """The generators of the program. Callers hold the recorder's lock."""

    def __init__(self, buffer: RecordBuffer, records: Records, session: Session, states: bool = True) -> None:
        """`states`: record the states. Otherwise a record says only that the generator is in another state."""
        self._session = session
        self._buffer = buffer
        self._records = records
        self._states = states
        self._recorded: dict[tuple[torch.device, int], _RecordedGenerator] = {}

    def number(self, generator: torch.Generator) -> int:
        """The id of a generator; a new one if the generator is unknown."""
        return self._entry(generator).number

    def _entry(self, generator: torch.Generator) -> _RecordedGenerator:
        # Operators get a new Python object for the same generator each time. Its address may be that of a dead one:
        # then the state differs and is recorded, and both share the id.
        key = (generator.device, address(generator))
        entry = self._recorded.get(key)
        if entry is None:
            default = default_generator(generator.device)
            is_default = default is not None and address(default) == address(generator)
            device = self._records.device(generator.device)
            session = self._session if is_default and generator.device.type == "cpu" else None
            entry = _RecordedGenerator(self._buffer.writer.generator(Generator(device, is_default)), session)
            if len(self._recorded) >= _REMEMBERED:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = entry
        return entry

    def before(self, generators: list[torch.Generator]) -> None:
        """An op is about to draw from these: record the states that a replay would not be in."""
        for generator in generators:
            self._state(self._entry(generator), generator_state(generator))

    def drew(self, generator: torch.Generator, before: bytes, after: bytes) -> None:
        """An op that is recorded late drew from a generator: its states around it."""
        entry = self._entry(generator)
        self._state(entry, before)
        entry.expected = after
        if entry.session is not None:
            entry.session.note_drawn(generator_state(generator) == after)

    def _state(self, entry: _RecordedGenerator, state: bytes) -> None:
        if state != entry.replayed():
            payload = self._buffer.writer.payload(state) if self._states else 0
            self._records.generator_state(entry.number, payload)
            entry.expected = state

    def after(self, generators: list[torch.Generator]) -> None:
        """The op drew."""
        for generator in generators:
            entry = self._entry(generator)
            entry.expected = generator_state(generator)
            if entry.session is not None:
                entry.session.note_drawn(True)


def address(generator: torch.Generator) -> int:
    """The address of the generator itself, whichever Python object wraps it."""
    return generator._cdata  # type: ignore[attr-defined]


def generator_state(generator: torch.Generator) -> bytes:
    return call_undispatched(lambda: _bytes_of(generator.get_state()))


def _bytes_of(state: torch.Tensor) -> bytes:
    storage = state.untyped_storage()  # keeps it alive while it is read; the view does not
    return bytes(host_view(storage))


def drawn_from(args: tuple[Any, ...], kwargs: dict[str, Any], devices: set[torch.device]) -> list[torch.Generator]:
    """The generators a random op may draw from: those it was given, else the known default generators of its
    devices."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    if given:
        return given
    defaults = [default_generator(device) for device in devices or {torch.device("cpu")}]
    return [generator for generator in defaults if generator is not None]


def unknown_generators(devices: set[torch.device]) -> list[str]:
    """Those of some devices that may have a default generator whose state cannot be read."""
    return sorted(str(each) for each in devices if is_accelerator(each) and default_generator(each) is None)
