"""Neutrino's probe files as ours: the TOML of its release (tables with `position`) and of its main branch (`map` and
`probe`, what its compiler makes of a probe in Python).

The code is PTX with a few words of its own: `SAVE` writes a record, `ADDR` and `BYTES` (of copies `IN2`) are those of
the memory instruction. Values are saved in the width that the record has. Code for AMD's GPUs, and what names other
operands, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from replayfmt.errors import UsageError

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
    """Whether a probe file is one of Neutrino's."""
    return "probe" in said or any(isinstance(each, dict) and "position" in each for each in said.values())


def as_own(said: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
    """The same probe in our form, as TOML reads it. Raises UsageError for what has no equal."""
    return _Translation(path, said).probe(name)


class _Translation:
    def __init__(self, path: str, said: Mapping[str, Any]) -> None:
        self._path, self._said = path, said
        self._registers: dict[str, str] = {}
        self._fields: list[list[str]] = []
        self._level, self._each = "thread", "launch"
        self._maps = self._table(said, "map") if "map" in said else {}

    def _wrong(self, where: str, expected: str, got: object) -> UsageError:
        return UsageError(f"{self._path}: {where}: expected {expected}, got {str(got)[:80]!r}")

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
