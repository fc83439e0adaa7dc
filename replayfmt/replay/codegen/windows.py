"""One window of a capture as straight-line Python: its text, constants, inputs and outputs.

`FrameLists` has the records of a frame as Python lists, `Variables` which variables exist and when each may be deleted.
`WindowText` collects lines and names while a window is being lowered; `Window` is the finished function. Each text is
compiled once: windows with the same text share one code object and differ in their constants, which are the function's
default arguments.
"""

from __future__ import annotations

import builtins
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replayfmt.format.reader import RecordFrame

from ..operations import View
from ..planning.scan import ContentSource, Scan, TensorKeys


class FrameLists:
    """The first `count` records of a frame.

    Lists indexed by tensor slot: `keys`, `storages`, `metas`, `ends` and `storage_ends`.
    """

    def __init__(self, frame: RecordFrame, count: int, keys: TensorKeys, scan: Scan) -> None:
        self.frame = frame
        self.first_ordinal = frame.first_ordinal
        self.signatures: list[int] = frame.signature[:count].tolist()
        self.scopes: list[int] = frame.scope[:count].tolist()
        self.tensor_first: list[int] = frame.tensor_first[: count + 1].tolist()
        self.int_first: list[int] = frame.int_first[: count + 1].tolist()
        self.float_first: list[int] = frame.float_first[: count + 1].tolist()
        self.ints: list[int] = frame.ints.tolist()
        self.floats: list[float] = frame.floats.tolist()
        slots = frame.tensor_slots[: self.tensor_first[-1]]
        ordinals = np.repeat(np.arange(count), np.diff(frame.tensor_first[: count + 1])) + frame.first_ordinal
        slot_keys = keys.of_frame(frame)[slots]
        slot_storages = frame.tensor_storage[slots].astype(np.int64)
        self.slots: list[int] = slots.tolist()
        self.keys: list[int] = slot_keys.tolist()
        self.storages: list[int] = slot_storages.tolist()
        self.metas: list[int] = frame.tensor_meta[slots].tolist()
        # Whether this slot's record is the last to use the slot's tensor key, and its storage.
        self.ends: list[bool] = (scan.last_use[slot_keys] == ordinals).tolist()
        self.storage_ends: list[bool] = (scan.storage_last_uses(slot_storages) == ordinals).tolist()

    def placement(self, row: int) -> int:
        return 0 if self.frame.placement is None else int(self.frame.placement[row])

    def offset(self, slot: int) -> int:
        """The offset of a slot's tensor, in elements."""
        return int(self.frame.tensor_offset[self.slots[slot]])


class Variables:
    """The live variables by key, across windows, and the storage of each. Negative keys are storages themselves."""

    def __init__(self) -> None:
        self._storage: dict[int, int] = {}
        self._on: dict[int, dict[int, None]] = {}
        self._idle: set[int] = set()  # past their last use, kept for their storage

    def __contains__(self, key: int) -> bool:
        return key in self._storage

    def define(self, key: int, storage: int) -> list[int]:
        """Add a variable; returns idle ones on its storage, which may now be deleted."""
        self._storage[key] = storage
        on = self._on.setdefault(storage, {})
        idle = [other for other in on if other in self._idle] if self._idle else []
        on[key] = None
        return idle

    def base(self, storage: int) -> int | None:
        """Any variable on a storage; None if there is none."""
        return next(iter(self._on.get(storage, ())), None)

    def all_on(self, storage: int) -> list[int]:
        return list(self._on.get(storage, ()))

    def alone(self, key: int) -> bool:
        """Whether a variable is the only one on its storage."""
        return len(self._on[self._storage[key]]) == 1

    def keep_idle(self, key: int) -> None:
        """Keep a variable past its last use: it is the only one on a storage that is used again."""
        self._idle.add(key)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            storage = self._storage.pop(key)
            on = self._on[storage]
            del on[key]
            if not on:
                del self._on[storage]
            self._idle.discard(key)


FILENAME = "<opreplay window>"
_CACHED_CODE = 256
# Lines of a window's text before its first statement: the def, and the line that unpacks the inputs.
_HEADER_LINES = 2


@dataclass(frozen=True)
class StagedStorage:
    """A storage whose first content enters in a window. `in_file`: the program's memory was a mapping of the file."""

    storage: int
    source: ContentSource
    length_bytes: int
    device: torch.device
    in_file: bool = False


@dataclass(eq=False)
class Window:
    """A run of records, called as `function(inputs, on_scope)`; returns the values of `outputs`.

    Variables are identified by key: a tensor key, or minus the id of a storage for the storage itself. `inputs` come
    from earlier windows, and those in `consumed` are not needed afterwards; `staged` storages enter before the call,
    and `hoisted` are views (key, key of the base, view) made before it; `dropped` are no longer needed once those are
    made. `line_ordinals` has the record of each line.
    """

    first_ordinal: int
    count: int
    function: Callable[..., list[Any]]
    inputs: list[int]
    consumed: list[bool]
    outputs: list[int]
    staged: list[StagedStorage]
    hoisted: list[tuple[int, int, View]]
    dropped: list[int]
    line_ordinals: list[int] = field(repr=False)
    returns_result: bool = False  # the function returns what its op returned, and defines no variables
    kernel: int | None = None  # index of the constant that its last op calls; None: there is no op

    @property
    def last_ordinal(self) -> int:
        return self.first_ordinal + self.count - 1

    @property
    def lines(self) -> range:
        """The numbers that lines of the function's text may have, from 0."""
        return range(_HEADER_LINES + 1 + len(self.line_ordinals))

    def ordinal_of_line(self, line: int) -> int:
        """The ordinal of the record that a line of the function's text belongs to."""
        index = line - _HEADER_LINES - 1
        return self.line_ordinals[index] if 0 <= index < len(self.line_ordinals) else self.first_ordinal


class CodeCache:
    """Compiled code by text; the least recently used is evicted first."""

    def __init__(self) -> None:
        self._codes: OrderedDict[str, types.CodeType] = OrderedDict()
        self.compiled = 0

    def code(self, text: str) -> types.CodeType:
        """The code object of the function that a text defines."""
        known = self._codes.get(text)
        if known is not None:
            self._codes.move_to_end(text)
            return known
        module = compile(text, FILENAME, "exec", dont_inherit=True)
        (code,) = (constant for constant in module.co_consts if isinstance(constant, types.CodeType))
        self.compiled += 1
        self._codes[text] = code
        if len(self._codes) > _CACHED_CODE:
            self._codes.popitem(last=False)
        return code


class WindowText:
    """The text of one window while it grows.

    Names: `v` registers, `i` inputs, `a` constants, `s` the scope callback.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.line_ordinals: list[int] = []
        self.inputs: list[int] = []
        self.returns_result = False
        self.kernel: int | None = None
        self._constants: list[Any] = []
        self._shared: dict[Hashable, str] = {}
        self._free: list[int] = []
        self._registers = 0

    def line(self, ordinal: int, text: str) -> None:
        """One line of code that belongs to a record."""
        self.lines.append(text)
        self.line_ordinals.append(ordinal)

    def constant(self, value: Any) -> str:
        """Add a parameter for a value; returns its name."""
        self._constants.append(value)
        return f"a{len(self._constants) - 1}"

    def shared(self, key: Hashable, value: Any) -> str:
        """A parameter for a value that is the same for equal `key`s."""
        name = self._shared.get(key)
        if name is None:
            name = self._shared[key] = self.constant(value)
        return name

    def input(self, key: int) -> str:
        """The name of a value from before the window."""
        self.inputs.append(key)
        return f"i{len(self.inputs) - 1}"

    def register(self) -> str:
        if self._free:
            return f"v{self._free.pop()}"
        self._registers += 1
        return f"v{self._registers - 1}"

    def free(self, name: str) -> None:
        """Free a register. Names of inputs are not reused."""
        if name[0] == "v":
            self._free.append(int(name[1:]))

    def function(self, cache: CodeCache, outputs: list[str]) -> Callable[..., list[Any]]:
        constants = self._constants
        parameters = "".join(f", a{index}" for index in range(len(constants)))
        taken = "".join(f"i{index}, " for index in range(len(self.inputs)))
        # Clearing the list leaves the window's names as the only references, so that `del` frees memory at once.
        take_in = f"[{taken}] = I; I.clear()" if self.inputs else "pass"
        body = "\n ".join([f"def window(I, s{parameters}):", take_in, *self.lines, f"return [{', '.join(outputs)}]"])
        code = cache.code(body + "\n")
        # PyTorch imports modules from the caller's frame, which takes the builtins from its globals.
        return types.FunctionType(code, {"__builtins__": builtins}, "window", tuple(constants))
