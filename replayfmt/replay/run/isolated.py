"""One op in isolation: run any number of times on its inputs, each time from the same memory.

What the op may write is a copy that `restore` restores, so that the replay around it goes on as if it had not run. Its
inputs that it only reads are the replay's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ..codegen.operations import MustRaise
from .copies import copied, copy_bytes, moved, storages_of
from .steps import Step, Touched


@dataclass(frozen=True)
class IsolatedCall:
    """One call of a kernel: its arguments, by position and by name, and what it returned; `raised`: an exception, as it
    did under capture."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    raised: bool = False


class IsolatedOp:
    """An op with its inputs, inside a replay that has reached it. Valid until the replay continues.

    `ordinal` and `signature` (an id of the capture) say which; `writes` whether it may change its inputs, so that calls
    must be kept apart by `restore`.
    """

    def __init__(self, step: Step, touched: Touched, inputs: Sequence[Any]) -> None:
        self.ordinal = step.ordinal
        self.signature = touched.signature
        self._function: Callable[..., list[Any]] = step.window.function
        self._kernel = step.window.kernel
        self._inputs = tuple(inputs)
        written = [place for place, key in enumerate(step.window.inputs) if key in touched.written_keys]
        self._originals = storages_of(inputs, written)
        self.writes = bool(written)
        self._work: dict[int, torch.UntypedStorage] = {}
        self._arguments: list[Any] = list(inputs)
        self.restore()

    def restore(self) -> None:
        """Put back what calls have written: bytes, lengths and the views themselves."""
        if not self.writes:
            return
        for key, original in self._originals.items():
            work = self._work.get(key)
            if work is None or work.nbytes() != original.nbytes():
                self._work[key] = copied(original)
            else:
                copy_bytes(work, original)
        self._arguments = moved(self._inputs, self._work)

    def addresses(self) -> tuple[int, ...]:
        """Where the memory is that calls write, as of the last `restore`."""
        return tuple(storage.data_ptr() for storage in self._work.values())

    def call(self) -> list[Any]:
        """Run the op once; what it returns is in the result until that is dropped. Raises whatever the op raises."""
        return self._function(list(self._arguments), None)

    def called(self) -> IsolatedCall:
        """Run the op once: what its kernel was given, and what it returned, also what the replay does not need. Raises
        whatever it raises."""
        function, place = self._function, self._kernel
        assert isinstance(function, FunctionType) and function.__defaults__ is not None and place is not None
        constants: list[Any] = list(function.__defaults__)
        kept: list[IsolatedCall] = []
        kernel = constants[place]

        def keep(*arguments: Any, **named: Any) -> Any:
            kept.append(IsolatedCall(arguments, named, kernel(*arguments, **named), isinstance(kernel, MustRaise)))
            return kept[-1].result

        constants[place] = keep
        FunctionType(function.__code__, function.__globals__, "window", tuple(constants))(list(self._arguments), None)
        return kept[0]

    def calls(self, count: int) -> None:
        """Run the op that often, letting go of each call's results at once."""
        call_repeatedly(self._function, self._arguments, count)


def call_repeatedly(function: Callable[..., list[Any]], arguments: Sequence[Any], count: int) -> None:
    """Call a window's function `count` times. A window empties the list it is given, so each call gets its own."""
    for _ in range(count):
        function(list(arguments), None)
