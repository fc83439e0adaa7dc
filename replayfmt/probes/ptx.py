"""PTX, the text that GPU kernels are compiled to before machine code: parsed, with probes put into it, assembled.

`parse_ptx` finds entry functions, their parameters and the instructions in their bodies, with their places in the text;
comments, debug lines and data sections stay where they are. `probed_ptx` puts a probe's instructions between them and
leaves every other character as it is. The function gets one more parameter, the address of the records, and a second
one, how many records fit into a row, where a row has as many as are needed, and registers of the probe's own.
`assemble` runs ptxas, of an installed CUDA or of the triton wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from replayfmt.errors import LibraryMissing, OpReplayError
from replayfmt.probes.definitions import MEMORY, ProbeDefinition, ProbeInstructions

from .recordings import PtxasFigures, read_ptxas_log

_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$%][\w$]*)")
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
    if not 0 <= begin < brace:
        raise PtxError(f"{_line(text, found.start())}: expected parameters of {found[1]} in parentheses")
    close = hidden.find(")", begin)
    if not begin < close < brace:
        raise PtxError(f"{_line(text, begin)}: expected a parenthesis that closes the parameters of {found[1]}")
    parameters = tuple(_parameters(text, hidden[begin + 1 : close], begin))
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


_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class AssembledPtx:
    """Machine code, what ptxas says of each kernel in it, and what it printed."""

    cubin: bytes
    figures: dict[str, PtxasFigures]
    log: str
    ptxas: str


@cache
def ptxas_programs() -> tuple[str, ...]:
    """Every ptxas there is, the newest first: in `CUDA_HOME`, on `PATH`, in the triton wheel."""
    found: list[str] = []
    if home := os.environ.get("CUDA_HOME"):
        found.append(str(Path(home, "bin", "ptxas")))
    if on_path := shutil.which("ptxas"):
        found.append(on_path)
    triton = find_spec("triton")  # finds it without importing it
    for folder in (triton.submodule_search_locations or []) if triton else []:
        found += [str(path) for path in sorted(Path(folder, "backends", "nvidia", "bin").glob("ptxas*"))]
    versions = {path: _version(path) for path in dict.fromkeys(found)}
    return tuple(
        sorted((path for path, version in versions.items() if version), key=lambda p: versions[p], reverse=True)
    )


def _version(path: str) -> tuple[int, ...]:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else ()


def assemble(text: str, target: str | None = None) -> AssembledPtx:
    """Assemble PTX for a target, by default its own. Each ptxas is tried, as old ones do not know new PTX and new
    ones no old targets. Raises PtxError with the first error of the newest, LibraryMissing where there is no ptxas."""
    programs = ptxas_programs()
    if not programs:
        raise LibraryMissing("assembling PTX needs ptxas: install CUDA and set CUDA_HOME, or pip install triton")
    arch = target or parse_ptx(text).target
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        source, cubin, log = Path(folder, "probed.ptx"), Path(folder, "probed.cubin"), Path(folder, "probed.log")
        source.write_text(text)
        for ptxas in programs:
            command = [ptxas, f"-arch={arch}", "--verbose", str(source), "-o", str(cubin)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                errors.append(f"{ptxas}: took more than {_TIMEOUT_SECONDS} s")
                continue
            if done.returncode == 0:
                log.write_text(done.stderr + done.stdout)
                return AssembledPtx(cubin.read_bytes(), read_ptxas_log(log)["probed"], log.read_text(), ptxas)
            errors.append(next((line for line in done.stderr.splitlines() if "error" in line or "fatal" in line), ""))
    raise PtxError(f"PTX: ptxas does not assemble it for {arch}: {errors[0].replace(str(source), 'the PTX')}")


_PREFIX = "%opreplay_"
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16, "16x2": 4}


@dataclass(frozen=True)
class ProbedPtx:
    """A module with a probe in it. `sites`: at how many places of each position. `called`: functions that the kernel
    calls, which hold no probe."""

    text: str
    entry: str
    sites: dict[str, int]
    called: tuple[str, ...]


def position_of(instruction: PtxInstruction) -> str | None:
    """Which of the positions of a probe an instruction is at; None: it is at none."""
    first, *rest = instruction.parts
    if first in ("ret", "exit"):
        return "end"
    if first in ("bra", "brx"):
        return "branch"
    if first in ("ld", "ldu") and "global" in rest:
        return "global_load"
    if first == "st" and "global" in rest:
        return "global_store"
    if first == "cp" and rest[:1] == ["async"] and rest[1:2] in (["ca"], ["cg"]):
        return "async_copy"
    if first == "mma" or (first in ("wmma", "tcgen05") and "mma" in rest) or (first == "wgmma" and "mma_async" in rest):
        return "matrix"
    return None


def accessed_bytes(instruction: PtxInstruction) -> str:
    """How many bytes of global memory one thread accesses: an operand of 32 bits. Raises PtxError."""
    if position_of(instruction) == "async_copy":
        operands = list(instruction.operands)
        if any("cache_hint" in part for part in instruction.parts):
            operands.pop()  # the policy of the cache
        if len(operands) < 3:
            raise PtxError(f"PTX: expected two addresses and a size, got {instruction.opcode} {instruction.operands}")
        # With a fourth operand, fewer bytes are read, and the rest is filled with zeros.
        return operands[-1] if len(operands) == 4 else str(int(operands[2], 0))
    count = next((int(part[1:]) for part in instruction.parts if part in ("v2", "v4", "v8")), 1)
    width = _WIDTHS.get(instruction.parts[-1].lstrip("busfe"))
    if width is None:
        raise PtxError(f"PTX: expected a type of 8 to 128 bits, got {instruction.opcode}")
    return str(count * width)


def probed_ptx(
    module: PtxModule, entry_name: str | None, probe: ProbeDefinition, *, counting: bool = False
) -> ProbedPtx:
    """Put a probe into an entry function. Raises PtxError."""
    entry = module.entry(entry_name)
    if _PREFIX in module.text:
        raise PtxError(f"PTX: expected a kernel without a probe, got registers {_PREFIX}…: it holds one already")
    return _Rewriter(module, entry, probe, counting).rewritten()


@dataclass
class _Rewriter:
    module: PtxModule
    entry: PtxEntry
    probe: ProbeDefinition
    counting: bool
    insertions: list[tuple[int, str]] = field(default_factory=list)
    sites: Counter[str] = field(default_factory=Counter)

    def rewritten(self) -> ProbedPtx:
        if not any(position_of(each) == "end" for each in self.entry.instructions):
            raise PtxError(f"PTX: {self.entry.name}: expected a return (ret or exit), got none")
        self._put(self.entry.parameters_end, self._parameters())
        self._put(self.entry.body_begin, "\n" + "".join(f"\t{line}\n" for line in self._beginning()))
        for instruction in self.entry.instructions:
            self._probe(instruction)
        if not any(self.sites[each] for each in self._saved_at()):
            wanted = ", ".join(self._saved_at())
            raise PtxError(f"PTX: {self.entry.name}: probe {self.probe.name} saves at {wanted}; the kernel has none")
        text, done = [], 0
        for place, inserted in sorted(self.insertions, key=lambda each: each[0]):
            text += [self.module.text[done:place], inserted]
            done = place
        text.append(self.module.text[done:])
        called = [each for each in self.entry.instructions if each.parts[0] == "call"]
        names = dict.fromkeys(next((o for o in each.operands if o[:1] not in "({"), "?") for each in called)
        return ProbedPtx("".join(text), self.entry.name, dict(self.sites), tuple(names))

    @property
    def _has_capacity(self) -> bool:
        return self.probe.each_site and not self.counting

    def _saved_at(self) -> list[str]:
        return list(dict.fromkeys(at for each in self.probe.instructions if each.save for at in each.at))

    def _put(self, place: int, text: str) -> None:
        self.insertions.append((place, text))

    def _parameters(self) -> str:
        added = [f".param .u64 {self.entry.name}_probe_records"]
        if self._has_capacity:
            added.append(f".param .u32 {self.entry.name}_probe_capacity")
        return (",\n\t" if self.entry.parameters else "\n\t") + ",\n\t".join(added) + "\n"

    def _beginning(self) -> Iterator[str]:
        """Registers, where the row of the thread is, and what the probe does at the start."""
        yield f"// probe {self.probe.name}{': counts' if self.counting else ''}"
        yield f".reg .pred {_PREFIX}saves;"
        yield f".reg .b32 {_PREFIX}u<4>;"
        yield f".reg .b64 {_PREFIX}row, {_PREFIX}wide, {_PREFIX}address;"
        if self.counting:
            yield f".reg .b64 {_PREFIX}count;"
            yield f"mov.b64 {_PREFIX}count, 0;"
            return
        for name, kind in self.probe.registers.items():
            yield f".reg .{kind} {_PREFIX}r_{name};"
            yield f"mov.{kind} {_PREFIX}r_{name}, 0;"
        if self.probe.each_site:
            yield f".reg .b32 {_PREFIX}left;"
            yield from self._row()
        for each in self.probe.instructions:
            if "start" in each.at:
                self.sites["start"] += 1
                yield from self._code(each, None)

    def _row(self) -> Iterator[str]:
        """Set `row` to the address of the thread's row, and `u0` to its number in the block."""
        u = [f"{_PREFIX}u{number}" for number in range(4)]
        row, wide = f"{_PREFIX}row", f"{_PREFIX}wide"
        yield f"mov.u32 {u[0]}, %tid.z;"
        yield f"mov.u32 {u[1]}, %ntid.y;"
        yield f"mov.u32 {u[2]}, %tid.y;"
        yield f"mad.lo.u32 {u[0]}, {u[0]}, {u[1]}, {u[2]};"
        yield f"mov.u32 {u[2]}, %ntid.x;"
        yield f"mov.u32 {u[3]}, %tid.x;"
        yield f"mad.lo.u32 {u[0]}, {u[0]}, {u[2]}, {u[3]};"  # thread of the block
        yield f"mul.lo.u32 {u[1]}, {u[1]}, {u[2]};"
        yield f"mov.u32 {u[2]}, %ntid.z;"
        yield f"mul.lo.u32 {u[1]}, {u[1]}, {u[2]};"  # threads of the block
        by_warp = self.probe.level == "warp" and not self.counting
        if by_warp:
            yield f"add.u32 {u[1]}, {u[1]}, 31;"
            yield f"shr.u32 {u[1]}, {u[1]}, 5;"
        yield f"cvt.u64.u32 {row}, {u[1]};"
        yield f"mov.u32 {u[1]}, %ctaid.z;"
        yield f"mov.u32 {u[2]}, %nctaid.y;"
        yield f"mov.u32 {u[3]}, %ctaid.y;"
        yield f"mad.lo.u32 {u[1]}, {u[1]}, {u[2]}, {u[3]};"
        yield f"mov.u32 {u[2]}, %nctaid.x;"
        yield f"mov.u32 {u[3]}, %ctaid.x;"
        yield f"cvt.u64.u32 {wide}, {u[3]};"
        yield f"mad.wide.u32 {wide}, {u[1]}, {u[2]}, {wide};"  # block of the grid
        yield f"mul.lo.u64 {row}, {row}, {wide};"
        if by_warp:
            yield f"shr.u32 {u[1]}, {u[0]}, 5;"
            yield f"cvt.u64.u32 {wide}, {u[1]};"
        else:
            yield f"cvt.u64.u32 {wide}, {u[0]};"
        yield f"add.u64 {row}, {row}, {wide};"  # row of the launch
        if self._has_capacity:
            yield f"ld.param.u32 {_PREFIX}left, [{self.entry.name}_probe_capacity];"
            yield f"mul.wide.u32 {wide}, {_PREFIX}left, {self.probe.record_bytes};"
            yield f"mul.lo.u64 {row}, {row}, {wide};"
        else:
            yield f"mul.lo.u64 {row}, {row}, {8 if self.counting else self.probe.record_bytes};"
        yield f"ld.param.u64 {wide}, [{self.entry.name}_probe_records];"
        yield f"cvta.to.global.u64 {wide}, {wide};"
        yield f"add.u64 {row}, {row}, {wide};"

    def _probe(self, instruction: PtxInstruction) -> None:
        """Put in what the probe does at an instruction."""
        position = position_of(instruction)
        if position is None:
            return
        before: list[str] = []
        after: list[str] = []
        chosen = [each for each in self.probe.instructions if position in each.at]
        for each in chosen:
            if position in MEMORY and not self.counting and self._names(each, "address"):
                before = [*self._address(instruction), *before]
            (before if each.when == "before" else after).extend(self._code(each, instruction))
        if position == "end" and self.counting:
            before += self._counted(instruction)
        if chosen or before:
            self.sites[position] += 1
        if before:
            self._put(instruction.begin, "".join(f"{line}\n\t" for line in before))
        if after:
            self._put(instruction.end, "".join(f"\n\t{line}" for line in after))

    @staticmethod
    def _names(each: ProbeInstructions, name: str) -> bool:
        return name in each.save or any(f"{{{name}}}" in line for line in each.code)

    def _address(self, instruction: PtxInstruction) -> Iterator[str]:
        """Before the instruction, which may load into the register of its own address."""
        place = 1 if position_of(instruction) in ("global_load", "async_copy") else 0
        base, offset = address(instruction.operands[place])
        if not base.startswith("%"):
            yield f"mov.u64 {_PREFIX}address, {base};"
            base = f"{_PREFIX}address"
        yield f"add.s64 {_PREFIX}address, {base}, {offset};"

    def _code(self, each: ProbeInstructions, instruction: PtxInstruction | None) -> Iterator[str]:
        """The probe's instructions at a place, and what saves there."""
        branch = instruction is not None and position_of(instruction) == "branch"
        # A branch is reached whether it is taken or not.
        guard = None if branch or instruction is None else instruction.guard
        negated = instruction is not None and instruction.guard_is_negated
        if self.counting:
            if each.save and instruction is not None:
                yield self._guarded(f"add.u64 {_PREFIX}count, {_PREFIX}count, 1;", guard, negated)
            return
        names = {name: f"{_PREFIX}r_{name}" for name in self.probe.registers}
        names["address"] = f"{_PREFIX}address"
        if instruction is not None and self._names(each, "bytes"):
            names["bytes"] = accessed_bytes(instruction)
        for line in each.code:
            for name, register in names.items():
                line = line.replace(f"{{{name}}}", register)
            yield self._guarded(line, guard, negated)
        if each.save:
            yield from self._saved([names[name] for name in each.save], guard, negated)

    @staticmethod
    def _guarded(line: str, guard: str | None, negated: bool) -> str:
        return line if guard is None else f"@{'!' if negated else ''}{guard} {line}"

    def _saved(self, registers: list[str], guard: str | None, negated: bool) -> Iterator[str]:
        """Store the fields into the row, where there is room, by the thread whose row it is."""
        condition = None
        if self.probe.each_site:
            condition = ("ne", f"{_PREFIX}left")
        else:
            yield from self._row()
            if self.probe.level == "warp":
                yield f"and.b32 {_PREFIX}u0, {_PREFIX}u0, 31;"
                condition = ("eq", f"{_PREFIX}u0")
        if condition is not None:
            test, register = condition
            also = "" if guard is None else f", {'!' if negated else ''}{guard}"
            yield f"setp.{test}{'.and' if also else ''}.u32 {_PREFIX}saves, {register}, 0{also};"
            guard, negated = f"{_PREFIX}saves", False
        offset = 0
        for each, register in zip(self.probe.fields, registers, strict=True):
            yield self._guarded(f"st.global.{each.kind} [{_PREFIX}row+{offset}], {register};", guard, negated)
            offset += each.nbytes
        if self.probe.each_site:
            yield self._guarded(f"add.u64 {_PREFIX}row, {_PREFIX}row, {offset};", guard, negated)
            yield self._guarded(f"sub.u32 {_PREFIX}left, {_PREFIX}left, 1;", guard, negated)

    def _counted(self, instruction: PtxInstruction) -> Iterator[str]:
        yield from self._row()
        line = f"st.global.u64 [{_PREFIX}row], {_PREFIX}count;"
        yield self._guarded(line, instruction.guard, instruction.guard_is_negated)
