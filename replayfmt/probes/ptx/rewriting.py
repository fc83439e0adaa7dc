"""Put the instructions of a probe into an entry function.

The function gets one more parameter, the address of the records, and a second one, how many records fit into a row,
where a row has as many as are needed; registers of the probe's own; and its instructions at the positions that the
probe names. Each thread, or the first lane of each warp, writes to a row of its own, so records need no atomic
instruction. Where an instruction has a guard, the probe's instructions there get the same one. All other text stays
as it is, debug lines and data included.

A probe that saves each time it is reached needs to know how often that is: `counting` makes a function that saves that
number for each thread, 64 bits, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from replayfmt.probes.definitions import MEMORY, ProbeDefinition, ProbeInstructions

from .parsing import PtxEntry, PtxError, PtxInstruction, PtxModule, address

_PREFIX = "%opreplay_"
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16, "16x2": 4}


@dataclass(frozen=True)
class ProbedPtx:
    """A module with a probe in it. `sites`: at how many places of each position. `called`: functions that the kernel
    calls, which hold no probe. `has_capacity`: whether the second parameter is there."""

    text: str
    entry: str
    sites: dict[str, int]
    called: tuple[str, ...]
    has_capacity: bool


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
        return ProbedPtx("".join(text), self.entry.name, dict(self.sites), tuple(names), self._has_capacity)

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
