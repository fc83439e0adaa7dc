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

Neutrino's probe files (its release's tables with `position`, its main branch's `map` and `probe`) are read as ours:
`SAVE` writes a record, `ADDR` and `BYTES` (of copies `IN2`) are those of the memory instruction. Code for AMD's GPUs,
and what names other operands, is refused.
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

from .recordings import Level, RecordLayout

_POSITIONS = {
    "ld.global": "global_load",
    "st.global": "global_store",
    "cp.async.ca": "async_copy",
    "cp.async.cg": "async_copy",
    "mma.sync.aligned": "matrix",
    "bra": "branch",
}
_COMMENT = re.compile(r"//[^\n]*")
_SAVE = re.compile(r"SAVE(?:\.([us](?:32|64)))?\s*(?:\[\s*(\w+)\s*\])?\s*\{([^{}]*)\}")
_REG = re.compile(r"\.reg\s+\.[busf](32|64)\s+(.*)", re.DOTALL)
_WIDTH = re.compile(r"\.[busf](32|64)\b")
_REGISTER = re.compile(r"%(\w+)")
_OPERAND = re.compile(r"\b(ADDR|BYTES|IN2|OUT|IN1|IN3|IN4)\b")
_SPECIAL = frozenset({"clock", "clock64", "smid", "globaltimer", "warpid", "laneid", "tid", "ctaid", "ntid", "nctaid"})
_ABOUT = frozenset({"author", "description", "analyze_hook", "callback", "CALLBACK", "dynamic", "regs"})


def is_neutrinos(said: Mapping[str, Any]) -> bool:
    return "probe" in said or any(isinstance(each, dict) and "position" in each for each in said.values())


def as_own(said: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
    """The same probe in our form, as TOML reads it. Raises UsageError for what has no equal."""
    return _Translation(path, said).probe(name)


def _wrong(path: str, where: str, expected: str, got: object) -> UsageError:
    """`got` is None for what is not there: TOML has no such value."""
    given = "it is missing" if got is None else f"got {str(got)[:80]!r}"
    return UsageError(f"{path}: {where}: expected {expected}, {given}")


class _Translation:
    def __init__(self, path: str, said: Mapping[str, Any]) -> None:
        self._path, self._said = path, said
        self._registers: dict[str, str] = {}
        self._fields: list[list[str]] = []
        self._level, self._each = "thread", "launch"
        self._maps = self._table(said, "map") if "map" in said else {}

    def _wrong(self, where: str, expected: str, got: object) -> UsageError:
        return _wrong(self._path, where, expected, got)

    def _table(self, said: Mapping[str, Any], key: str) -> dict[str, Any]:
        found = said.get(key)
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise self._wrong(key, "a table of tables", found)
        return found

    def probe(self, name: str) -> dict[str, Any]:
        newer = "probe" in self._said
        if newer:
            parts = self._table(self._said, "probe")
        else:
            parts = {key: each for key, each in self._said.items() if key not in _ABOUT}
        instructions = []
        for key, part in parts.items():
            if not isinstance(part, dict) or key == "REGS":
                raise self._wrong(key, "a table with PTX (probes for AMD's GPUs are not read)", part)
            positions = part.get("position", part.get("pos"))
            if not isinstance(positions, str):
                raise self._wrong(f"{key}.position", "a string", positions)
            self._model(key, part.get("datamodel"))
            for when in ("before", "after"):
                code = part.get(when)
                if code is None:
                    continue
                if not isinstance(code, str):
                    raise self._wrong(f"{key}.{when}", "a string", code)
                at, own = self._at(f"{key}.position", positions, when)
                lines, save = self._code(f"{key}.{when}", code)
                instructions.append({"at": at, "when": own, "code": lines, "save": save})
        return {
            "name": re.sub(r"\W", "_", name.lower()),
            "about": " ".join(str(self._said.get("description", "a probe of Neutrino's")).split()),
            "registers": self._registers,
            "record": {"level": self._level, "each": self._each, "fields": self._fields},
            "instruction": instructions,
        }

    def _model(self, key: str, model: object) -> None:
        """What a probe saves: LEVEL:BYTES, or LEVEL:BYTES:HOW MANY."""
        if model is None:
            return
        found = re.fullmatch(r"(thread|warp):\d+(:\w+)?", model) if isinstance(model, str) else None
        if found is None:
            raise self._wrong(f"{key}.datamodel", "LEVEL:BYTES or LEVEL:BYTES:COUNT", model)
        self._level, self._each = found[1], "site" if found[2] else "launch"

    def _at(self, where: str, positions: str, when: str) -> tuple[list[str], str]:
        names = positions.split(":")
        if names == ["kernel"]:
            return ["start" if when == "before" else "end"], "before"
        if any(each not in _POSITIONS for each in names):
            raise self._wrong(where, f"kernel, or some of {', '.join(_POSITIONS)}", positions)
        if "bra" in names:
            when = "before"  # nothing is reached after a branch that is taken
        return list(dict.fromkeys(_POSITIONS[each] for each in names)), when

    def _code(self, where: str, code: str) -> tuple[list[str], list[str]]:
        """PTX as lines of ours, and the registers that are saved."""
        code = _COMMENT.sub("", code)
        saves = _SAVE.findall(code)
        lines: list[str] = []
        # Braces are scopes of registers, whose names are all different here.
        for statement in _SAVE.sub(";", code).replace("{", ";").replace("}", ";").split(";"):
            text = " ".join(statement.split())
            declared = _REG.fullmatch(text)
            if declared is not None:
                self._declare(declared[1], declared[2])
            elif text:
                lines += self._line(where, text)
        saved: list[str] = []
        fields: list[list[str]] = []
        for kind, name, values in saves:
            texts = [each.strip() for each in values.split(",")]
            names = [each.lstrip("%").lower() for each in texts]
            kinds = [kind or self._registers.get(each, "b64").replace("b", "u") for each in names]
            if name:
                kinds, names = self._of_map(where, name, kinds, names)
            for text, of, title in zip(texts, kinds, names, strict=True):
                fields.append(["address" if text == "ADDR" else title, of.replace("s", "u")])
                saved.append(self._saved(where, text, of[1:], lines))
        if fields and self._fields and fields != self._fields:
            raise self._wrong(where, "one kind of record", fields)
        self._fields = fields or self._fields
        return lines, saved

    def _of_map(self, where: str, name: str, kinds: list[str], names: list[str]) -> tuple[list[str], list[str]]:
        """The fields of a map; one that names none has those that are saved."""
        found = self._maps.get(name)
        if found is None:
            raise self._wrong(where, f"one of the maps {', '.join(self._maps)}", name)
        self._level = str(found.get("level"))
        self._each = "launch" if str(found.get("cap", 1)) == "1" else "site"
        registers = found.get("regs")
        if registers is None:
            return kinds, names
        if not isinstance(registers, dict) or len(registers) != len(names):
            raise self._wrong(f"map.{name}.regs", f"{len(names)} registers", registers)
        kinds = [each[0] if isinstance(each, list) and each else each for each in registers.values()]
        if any(each not in ("u32", "u64") for each in kinds):
            raise self._wrong(f"map.{name}.regs", "u32 or u64", kinds)
        return kinds, [each.lower() for each in registers]

    def _declare(self, width: str, names: str) -> None:
        for each in names.replace("%", "").split(","):
            name, _bracket, count = each.strip().partition("<")
            if count.rstrip("> ").isdigit():
                for place in range(min(int(count.rstrip("> ")), 64)):
                    self._registers[f"{name}{place}".lower()] = f"b{width}"
            else:
                self._registers[name.lower()] = f"b{width}"

    def _line(self, where: str, text: str) -> list[str]:
        """One instruction, after what makes its operands as wide as it is."""
        found = _WIDTH.search(text)
        width = found[1] if found else "64"
        before: list[str] = []

        def register(match: re.Match[str]) -> str:
            name = match[1].lower()
            if name in _SPECIAL:
                return match[0]
            self._registers.setdefault(name, f"b{width}")
            return f"{{{name}}}"

        def operand(match: re.Match[str]) -> str:
            if match[1] == "ADDR":
                return "{address}"
            if match[1] not in ("BYTES", "IN2"):
                raise self._wrong(where, "ADDR or BYTES as operands of memory instructions", match[1])
            if width == "32":
                return "{bytes}"
            self._registers["wide"] = "b64"
            before.append("cvt.u64.u32 {wide}, {bytes};")
            return "{wide}"

        text = _OPERAND.sub(operand, _REGISTER.sub(register, text))
        return [*before, f"{text};"]

    def _saved(self, where: str, text: str, width: str, lines: list[str]) -> str:
        """The register of a value, as wide as its field."""
        if text == "ADDR":
            return "address"
        name = text.lstrip("%").lower()
        if not text.startswith("%"):
            raise self._wrong(where, "registers or ADDR to save", text)
        if name in _SPECIAL and name not in self._registers:
            kind = "64" if name in ("clock64", "globaltimer") else "32"
            self._registers[f"own_{name}"] = f"b{kind}"
            lines.append(f"mov.u{kind} {{own_{name}}}, {text};")
            name = f"own_{name}"
        own = self._registers.setdefault(name, f"b{width}")[1:]
        if own == width:
            return name
        self._registers[f"{name}_{width}"] = f"b{width}"
        lines.append(f"cvt.u{width}.u{own} {{{name}_{width}}}, {{{name}}};")
        return f"{name}_{width}"


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
        dtype = np.dtype([(each.name, _FIELD_TYPES[each.kind]) for each in self.fields])
        return RecordLayout(self.name, dtype, self.level, single=not self.each_site)


def shipped_probes() -> list[ProbeDefinition]:
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
    except (ValueError, RecursionError) as error:  # a syntax error, a number of thousands of digits, deep nesting
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
        return _wrong(self._path, key, expected, got)

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
