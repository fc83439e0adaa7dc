"""Random generators. Their state must be recorded before an op draws from them.

After a captured draw, a replay's generator will be in the same state, so that state is predictable. A state is recorded
only if the generator is in a different one (first use, seeding, unseen draws). Captures without content leave out the
state itself, because it reveals the seed.
"""

from __future__ import annotations

from typing import Any

import torch

from replayfmt.format.model import Generator
from replayfmt.pytorch.accelerators import default_generator, is_accelerator
from replayfmt.pytorch.tensors.memory import call_undispatched, host_view

from ..stream.buffer import RecordBuffer
from ..stream.records import Records

_REMEMBERED = 4096  # generators; if a program makes more, the oldest get new ids


class _RecordedGenerator:
    """`native`: the session of the hot path, if ops there draw from it."""

    __slots__ = ("expected", "native", "number")

    def __init__(self, number: int, native: Any) -> None:
        self.number = number
        self.native = native
        self.expected: bytes | None = None  # the state that a replay's will be in, as far as the complete path knows

    def replayed(self) -> bytes | None:
        """The state that a replay's generator will be in. Where the hot path draws, it knows: `expected` may be one
        that its draws have left since, and that the program has gone back to."""
        drawn = None if self.native is None else call_undispatched(self.native.drawn_state)
        return self.expected if drawn is None else call_undispatched(_bytes_of, drawn)


class Generators:
    """The generators of the program. Callers hold the recorder's lock."""

    def __init__(self, buffer: RecordBuffer, records: Records, states: bool = True, native: Any = None) -> None:
        """`states`: record the states. Otherwise a record says only that the generator is in another state. `native`:
        the session of the hot path, where ops draw from the default generator of the CPU."""
        self._native = native
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
            native = self._native if is_default and generator.device.type == "cpu" else None
            entry = _RecordedGenerator(self._buffer.writer.generator(Generator(device, is_default)), native)
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
        if entry.native is not None:
            entry.native.note_drawn(generator_state(generator) == after)

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
            if entry.native is not None:
                entry.native.note_drawn(True)


def address(generator: torch.Generator) -> int:
    """The address of the generator itself, whichever Python object wraps it."""
    return generator._cdata  # type: ignore[attr-defined]


def generator_state(generator: torch.Generator) -> bytes:
    return call_undispatched(_state_bytes, generator)


def _state_bytes(generator: torch.Generator) -> bytes:
    return _bytes_of(generator.get_state())


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
