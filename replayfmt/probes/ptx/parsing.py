"""The entry functions of a PTX module, and the statements in their bodies, with their places in the text.

Only as much is parsed as probes need: names, parameters, labels, guards, opcodes and operands. Comments, debug lines
and data sections stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from replayfmt.errors import OpReplayError

_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$%][\w$]*)")
_FUNCTION = re.compile(r"\.func\b")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_PARAMETER = re.compile(r"\.param (.+?) ([A-Za-z_$%][\w$]*) ?(\[\d+\])?$")
_LINES = (".loc", ".file", ".section", ".line")  # directives that end with their line


class PtxError(OpReplayError):
    """PTX that cannot be read, or cannot be probed."""


@dataclass(frozen=True)
class PtxParameter:
    """A parameter of an entry function: its type, as `.u64 .ptr .global .align 16`, and name."""

    kind: str
    name: str


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction. `begin` and `end` are its places in the text, with its guard and semicolon. `guard`: a
    predicate, `guard_is_negated` for `@!%p`."""

    begin: int
    end: int
    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    guard_is_negated: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the opcode: `ld`, `global`, `b32`."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class PtxEntry:
    """An entry function. `parameters_end` is the place of the parenthesis that closes the parameters, `body_begin` that
    after the brace that opens the body, `labels` the number of the instruction after each label."""

    name: str
    parameters: tuple[PtxParameter, ...]
    parameters_end: int
    body_begin: int
    body_end: int
    instructions: tuple[PtxInstruction, ...]
    labels: dict[str, int] = field(compare=False)


@dataclass(frozen=True)
class PtxModule:
    """A module: its text, its PTX version, target and entry functions."""

    text: str
    version: tuple[int, int]
    target: str
    entries: tuple[PtxEntry, ...]

    def entry(self, name: str | None = None) -> PtxEntry:
        """The entry function of a name, or the only one. Raises PtxError."""
        names = [each.name for each in self.entries]
        if name is None and len(names) == 1:
            return self.entries[0]
        for each in self.entries:
            if each.name == name:
                return each
        wanted = f"an entry function {name}" if name is not None else "one entry function, or its name"
        raise PtxError(f"PTX: expected {wanted}, got {', '.join(names) or 'none'}")


def parse_ptx(text: str) -> PtxModule:
    """Parse a module. Raises PtxError with the line."""
    version = re.search(r"^[ \t]*\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    target = re.search(r"^[ \t]*\.target\s+(\w+)", text, re.MULTILINE)
    if version is None or target is None:
        raise PtxError("PTX: expected .version and .target; this is not PTX")
    if not re.search(r"^[ \t]*\.address_size\s+64\b", text, re.MULTILINE):
        raise PtxError("PTX: expected .address_size 64")
    hidden = _without_comments(text)
    entries: list[PtxEntry] = []
    for found in _ENTRY.finditer(hidden):
        if entries and found.start() < entries[-1].body_end:
            raise PtxError(f"{_line(text, found.start())}: {found[1]} is an entry function inside {entries[-1].name}")
        entries.append(_entry(text, hidden, found))
    if not entries:
        raise PtxError("PTX: expected an entry function (.entry), got none")
    return PtxModule(text, (int(version[1][:9]), int(version[2][:9])), target[1], tuple(entries))


def _without_comments(text: str) -> str:
    """The text with blanks in place of comments and quoted strings, so that places stay the same."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    # What is not closed goes to the end: otherwise each of many would be followed there in vain.
    return re.sub(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"?', blank, text, flags=re.DOTALL)


def _line(text: str, place: int) -> str:
    return f"PTX: line {text.count(chr(10), 0, place) + 1}"


def _entry(text: str, hidden: str, found: re.Match[str]) -> PtxEntry:
    begin = hidden.find("(", found.end())
    brace = hidden.find("{", found.end())
    if brace < 0:
        raise PtxError(f"{_line(text, found.start())}: expected a body of {found[1]}, got the end")
    parameters: tuple[PtxParameter, ...] = ()
    close = found.end()
    if 0 <= begin < brace:
        close = hidden.find(")", begin)
        if not begin < close < brace:
            raise PtxError(f"{_line(text, begin)}: expected a parenthesis that closes the parameters of {found[1]}")
        parameters = tuple(_parameters(text, hidden[begin + 1 : close], begin))
    else:
        raise PtxError(f"{_line(text, found.start())}: expected parameters of {found[1]} in parentheses")
    end = _closing(text, hidden, brace)
    labels: dict[str, int] = {}
    instructions = tuple(_instructions(text, hidden, brace + 1, end, labels))
    return PtxEntry(found[1], parameters, close, brace + 1, end, instructions, labels)


def _parameters(text: str, listed: str, place: int) -> Iterator[PtxParameter]:
    for each in listed.split(","):
        if said := " ".join(each.split()):
            found = _PARAMETER.match(said)
            if found is None:
                raise PtxError(f"{_line(text, place)}: expected .param TYPE NAME, got {said[:60]!r}")
            yield PtxParameter(found[1], found[2])


def _closing(text: str, hidden: str, brace: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(hidden, brace):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.start()
    raise PtxError(f"{_line(text, brace)}: expected a brace that closes this body, got the end")


def _instructions(text: str, hidden: str, place: int, end: int, labels: dict[str, int]) -> Iterator[PtxInstruction]:
    count = 0
    while True:
        blank = _BLANK.match(hidden, place, end)
        place = blank.end() if blank else place
        if place >= end:
            return
        if hidden[place] in "{}":
            place += 1
        elif label := _LABEL.match(hidden, place, end):
            labels[label[1]] = count
            place = label.end()
        elif hidden.startswith(_LINES, place):
            place = min(end, (hidden.find("\n", place) + 1) or end)
        else:
            semicolon = hidden.find(";", place, end)
            if semicolon < 0:
                raise PtxError(f"{_line(text, place)}: expected a semicolon after {text[place : place + 40]!r}")
            if hidden[place] not in ".;":
                yield _instruction(text, hidden, place, semicolon + 1)
                count += 1
            place = semicolon + 1


def _instruction(text: str, hidden: str, begin: int, end: int) -> PtxInstruction:
    said = hidden[begin : end - 1]
    guard = _GUARD.match(said)
    opcode, *rest = said[guard.end() if guard else 0 :].split(None, 1) or [""]
    if not re.fullmatch(r"[a-z][\w.:]*", opcode):
        raise PtxError(f"{_line(text, begin)}: expected an instruction, got {said.strip()[:60]!r}")
    operands = tuple(_split(rest[0])) if rest else ()
    return PtxInstruction(begin, end, opcode, operands, guard[2] if guard else None, bool(guard and guard[1]))


def _split(operands: str) -> Iterator[str]:
    """Operands between commas that are in no braces, brackets or parentheses."""
    depth = start = 0
    for place, letter in enumerate(operands):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            yield " ".join(operands[start:place].split())
            start = place + 1
    yield " ".join(operands[start:].split())


def vector(operand: str) -> tuple[str, ...]:
    """The registers of an operand: those in braces, or the operand itself."""
    if operand.startswith("{") and operand.endswith("}"):
        return tuple(each.strip() for each in operand[1:-1].split(","))
    return (operand,)


def address(operand: str) -> tuple[str, int]:
    """Base and offset of an address in brackets. Raises PtxError."""
    found = re.fullmatch(r"\[\s*([%$\w]+)(?:\s*\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?\s*\]", operand)
    if found is None:
        raise PtxError(f"PTX: expected an address, [BASE] or [BASE+OFFSET], got {operand!r}")
    return found[1], int(found[2] or "0", 0)
