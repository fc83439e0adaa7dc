"""Probes as TOML files: where instructions are put, which, what they keep in registers, and what they save.

```toml
name = "block_sched"
about = "when each warp ran, and on which SM"
cost = "two clock reads and one store for each warp"

[registers]                      # of each thread, named in the instructions as {start}; 0 where the kernel starts
start = "b64"

[record]
level = "warp"                   # a row for each warp, which its first lane saves, or for each "thread"
each = "launch"                  # one record in a row; "site": one each time that an instruction with `save` is reached
fields = [["start", "u64"], ["elapsed", "u32"], ["sm", "u32"]]

[[instruction]]
at = ["start"]                   # where: see POSITIONS
when = "after"                   # or "before", the instruction; start and end need none
code = ["mov.u64 {start}, %clock64;"]
save = []                        # registers to save here, one for each field
```

`{address}` and `{bytes}` stand for the address of a memory instruction, a register of 64 bits, and for how many bytes
it accesses in each thread, an operand of 32 bits. Instructions have no guards and no labels: the rewriter gives them
the guard of the instruction that they belong to.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from replayfmt.errors import CaptureNotFound, UsageError

from .neutrino import as_own, is_neutrinos
from .recordings import Level, RecordLayout

# Where instructions may be put, and what is meant.
POSITIONS = {
    "start": "the beginning of the kernel",
    "end": "before each return of the kernel",
    "global_load": "ld.global",
    "global_store": "st.global",
    "async_copy": "cp.async from global to shared memory (not bulk copies)",
    "matrix": "mma, wmma, wgmma and tcgen05 matrix instructions",
    "branch": "bra and brx",
}
MEMORY = frozenset({"global_load", "global_store", "async_copy"})
REGISTER_TYPES = ("b32", "b64")
_FIELD_TYPES = {"u32": "<u4", "u64": "<u8"}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}$")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_CODE = re.compile(r"[a-z][\w.]*\s[^;@:]*;$")


@dataclass(frozen=True)
class ProbeField:
    """A field of a record: `u32` or `u64`."""

    name: str
    kind: str

    @property
    def nbytes(self) -> int:
        return 4 if self.kind == "u32" else 8


@dataclass(frozen=True)
class ProbeInstructions:
    """Instructions at some positions. `save`: the register of each field that is saved after them, or none."""

    at: tuple[str, ...]
    when: Literal["before", "after"]
    code: tuple[str, ...]
    save: tuple[str, ...]


@dataclass(frozen=True)
class ProbeDefinition:
    """A probe. `registers`: their types by name. `each_site`: a record each time that a saving instruction is reached,
    instead of one in a launch."""

    name: str
    about: str
    cost: str
    registers: dict[str, str]
    level: Level
    each_site: bool
    fields: tuple[ProbeField, ...]
    instructions: tuple[ProbeInstructions, ...]

    @property
    def record_bytes(self) -> int:
        return sum(each.nbytes for each in self.fields)

    @property
    def layout(self) -> RecordLayout:
        """How the records look in a result file."""
        dtype = np.dtype([(each.name, _FIELD_TYPES[each.kind]) for each in self.fields])
        return RecordLayout(self.name, dtype, self.level, single=not self.each_site)


def shipped_probes() -> list[ProbeDefinition]:
    """The probes of this package, by name."""
    folder = files("replayfmt.probes").joinpath("shipped")
    named = sorted((each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name)
    return [parse_probe(each.read_text(encoding="utf-8"), each.name) for each in named]


def find_probe(name: str | os.PathLike[str]) -> ProbeDefinition:
    """A probe of this package by name, or one in a TOML file by path. Raises UsageError, CaptureNotFound."""
    shipped = {each.name: each for each in shipped_probes()}
    if os.fspath(name) in shipped:
        return shipped[os.fspath(name)]
    path = Path(name)
    if path.suffix != ".toml":
        raise UsageError(f"{path}: expected a probe, one of {', '.join(shipped)}, or the path of a .toml file")
    try:
        return parse_probe(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise CaptureNotFound(f"{path}: {error.strerror}; expected a probe, a .toml file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected TOML in UTF-8: {error.reason}") from None


def parse_probe(text: str, path: str) -> ProbeDefinition:
    """Parse a probe; `path` is for messages. Raises UsageError."""
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: expected TOML: {error}") from None
    return _Parser(path).probe(as_own(said, path, Path(path).stem) if is_neutrinos(said) else said)


def probe_row(probe: ProbeDefinition) -> dict[str, Any]:
    """A probe for people and for JSON: what it saves, where, and what that costs."""
    return {
        "name": probe.name,
        "about": probe.about,
        "cost": probe.cost,
        "positions": list(dict.fromkeys(at for each in probe.instructions for at in each.at)),
        "saves": [f"{each.name} {each.kind}" for each in probe.fields],
        "record_bytes": probe.record_bytes,
        "row_of": f"each {probe.level}",
        "records": "one each time that it saves, counted first" if probe.each_site else "one in a launch",
    }


class _Parser:
    """Takes a probe apart; every mistake is one UsageError with the key."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _wrong(self, key: str, expected: str, got: object) -> UsageError:
        return UsageError(f"{self._path}: {key}: expected {expected}, got {str(got)[:80]!r}")

    def _take(self, table: Mapping[str, Any], key: str, where: str, kind: type, default: Any = None) -> Any:
        value = table.get(key, default)
        if not isinstance(value, kind):
            names = {"str": "a string", "list": "a list", "dict": "a table"}
            raise self._wrong(where + key, names[kind.__name__], value)
        return value

    def _known(self, table: Mapping[str, Any], where: str, *keys: str) -> None:
        for key in table:
            if key not in keys:
                raise self._wrong(where + key, f"one of {', '.join(keys)}", key)

    def probe(self, said: dict[str, Any]) -> ProbeDefinition:
        self._known(said, "", "name", "about", "cost", "registers", "record", "instruction")
        name = self._take(said, "name", "", str)
        if not _NAME.match(name):
            raise self._wrong("name", "a name of letters, digits and _", name)
        registers = self._take(said, "registers", "", dict, {})
        for register, kind in registers.items():
            if not _NAME.match(register) or register in ("address", "bytes") or kind not in REGISTER_TYPES:
                raise self._wrong(f"registers.{register}", f"a name and one of {', '.join(REGISTER_TYPES)}", kind)
        record = self._take(said, "record", "", dict)
        self._known(record, "record.", "level", "each", "fields")
        level, each = record.get("level"), record.get("each", "launch")
        if level not in ("warp", "thread"):
            raise self._wrong("record.level", "warp or thread", level)
        if each not in ("launch", "site"):
            raise self._wrong("record.each", "launch or site", each)
        fields = self._fields(self._take(record, "fields", "record.", list))
        listed = self._take(said, "instruction", "", list)
        instructions = tuple(
            self._instruction(each_of, f"instruction[{place}].", registers, fields)
            for place, each_of in enumerate(listed)
        )
        saving = [each_of for each_of in instructions if each_of.save]
        if not saving:
            raise self._wrong("instruction", "one with save", "none")
        if each == "launch" and any(set(each_of.at) != {"end"} for each_of in saving):
            raise self._wrong("save", "to be at the end alone where each is launch", saving[0].at)
        if level == "warp" and each == "site":
            raise self._wrong("record.each", "launch where level is warp: lanes part", each)
        return ProbeDefinition(
            name,
            self._take(said, "about", "", str, ""),
            self._take(said, "cost", "", str, ""),
            dict(registers),
            level,
            each == "site",
            fields,
            instructions,
        )

    def _fields(self, said: list[Any]) -> tuple[ProbeField, ...]:
        found: list[ProbeField] = []
        offset = 0
        for place, pair in enumerate(said):
            where = f"record.fields[{place}]"
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
                raise self._wrong(where, "[NAME, TYPE]", pair)
            if not _NAME.match(pair[0]) or pair[1] not in _FIELD_TYPES or pair[0] in {each.name for each in found}:
                raise self._wrong(where, "a new name and u32 or u64", pair)
            found.append(ProbeField(*pair))
            if offset % found[-1].nbytes:
                raise self._wrong(where, f"an offset that is a multiple of {found[-1].nbytes} bytes", offset)
            offset += found[-1].nbytes
        if not found or offset % max(each.nbytes for each in found):
            raise self._wrong(
                "record.fields", "fields whose size is a multiple of the largest one's", f"{offset} bytes"
            )
        return tuple(found)

    def _instruction(
        self, said: Any, where: str, registers: Mapping[str, str], fields: tuple[ProbeField, ...]
    ) -> ProbeInstructions:
        if not isinstance(said, dict):
            raise self._wrong(where, "a table", said)
        self._known(said, where, "at", "when", "code", "save")
        at = self._take(said, "at", where, list)
        if not at or any(each not in POSITIONS for each in at):
            raise self._wrong(where + "at", f"some of {', '.join(POSITIONS)}", at)
        when = said.get("when", "before")
        if when not in ("before", "after"):
            raise self._wrong(where + "when", "before or after", when)
        if when == "after" and "branch" in at:
            raise self._wrong(where + "when", "before: nothing is reached after a branch", when)
        known = set(registers) | ({"address", "bytes"} if set(at) <= MEMORY else set())
        code = self._take(said, "code", where, list)
        for line in code:
            if not isinstance(line, str) or not _CODE.match(line):
                raise self._wrong(where + "code", "one instruction with its semicolon, no guard and no label", line)
            for used in _PLACEHOLDER.findall(line):
                if used not in known:
                    raise self._wrong(where + "code", f"in braces one of {', '.join(sorted(known))}", used)
        save = self._take(said, "save", where, list, [])
        if save and len(save) != len(fields):
            raise self._wrong(where + "save", f"{len(fields)} registers, one for each field", save)
        for register, field in zip(save, fields, strict=False):
            wanted = "b32" if field.nbytes == 4 else "b64"
            kind = "b64" if register == "address" and register in known else registers.get(register)
            if kind != wanted:
                raise self._wrong(where + "save", f"a register of {wanted} for {field.name}", register)
        return ProbeInstructions(tuple(at), when, tuple(code), tuple(save))
