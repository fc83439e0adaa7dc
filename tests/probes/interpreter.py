"""A small interpreter of the PTX that the kernels here use: blocks one after the other, the threads of one as NumPy
lanes.

Of the threads that are not done, those at the earliest instruction go on, so that threads that parted meet again. Where
an instruction is not known, it raises. The clock counts steps. What it counts itself, of each position of a probe and
each thread, is what probes have to find.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from typing import Any

import numpy as np

from replayfmt.probes.ptx import PtxEntry, PtxInstruction, PtxModule, address, position_of, vector

Lanes = np.ndarray[Any, np.dtype[Any]]
GLOBAL_BASE = 0x10_0000
SM = 3
DTYPES = {
    "b8": "u1", "u8": "u1", "b16": "u2", "u16": "u2", "f16": "f2", "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4",
    "b64": "u8", "u64": "u8", "s64": "i8",
}  # fmt: skip
BARRIER = {"bar", "barrier"}


class Device:
    """Global memory: one run of bytes, in which arrays are placed at multiples of 256."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.base = GLOBAL_BASE
        self.bytes = np.zeros(size, np.uint8)
        self._used = 0

    def place(self, array: Lanes) -> int:
        """Copy an array to the device; its address."""
        begin = self._used
        raw = np.frombuffer(array.tobytes(), np.uint8)
        self.bytes[begin : begin + len(raw)] = raw
        self._used += -(-len(raw) // 256) * 256
        assert self._used <= len(self.bytes)
        return self.base + begin

    def read(self, begin: int, dtype: Any, count: int) -> Lanes:
        """An array on the device, copied."""
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer(self.bytes[begin - self.base :][:size].tobytes(), dtype)


class HostMemory(Device):
    """The memory of this process, where tensors of the CPU are."""

    def __init__(self) -> None:
        self.base = 1 << 12
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * ((1 << 47) - self.base)).from_address(self.base))


def launch(
    module: PtxModule, entry: str, device: Device, grid: tuple[int, int, int], block: tuple[int, int, int], *values: int
) -> dict[str, Lanes]:
    """Run a kernel. `values`: of its parameters, as bits. How often each thread of the launch reached each position
    of a probe, where its guard held: arrays (blocks, threads)."""
    counts: dict[str, list[Lanes]] = defaultdict(list)
    blocks = grid[0] * grid[1] * grid[2]
    for number in range(blocks):
        place = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        run = _Block(module, module.entry(entry), device, grid, block, place, values)
        run.run()
        for position in ("global_load", "global_store", "async_copy", "matrix", "branch", "end"):
            counts[position].append(run.reached[position])
    return {position: np.array(each) for position, each in counts.items()}


class _Block:
    def __init__(
        self,
        module: PtxModule,
        entry: PtxEntry,
        device: Device,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        place: tuple[int, int, int],
        values: tuple[int, ...],
    ) -> None:
        self.entry, self.device = entry, device
        self.count = block[0] * block[1] * block[2]
        lane = np.arange(self.count)
        self.lane = lane
        names = [each.name for each in entry.parameters]
        assert len(values) == len(names), (names, values)
        self.parameters = dict(zip(names, values, strict=True))
        self.special = {"%laneid": lane % 32, "%smid": np.full(self.count, SM)}
        tid = (lane % block[0], lane // block[0] % block[1], lane // (block[0] * block[1]))
        for axis, letter in enumerate("xyz"):
            self.special[f"%tid.{letter}"] = tid[axis]
            for name, value in (("ntid", block), ("ctaid", place), ("nctaid", grid)):
                self.special[f"%{name}.{letter}"] = np.full(self.count, value[axis])
        self.shared = np.zeros(1 << 16, np.uint8)
        self.symbols: dict[str, int] = {}
        for found in re.finditer(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d*)\]", module.text):
            self.symbols[found[1]] = 1024 * len(self.symbols)
        self.registers: dict[str, Lanes] = {}
        self.pc = np.zeros(self.count, np.int64)
        self.waits = np.zeros(self.count, bool)
        self.reached = defaultdict(lambda: np.zeros(self.count, np.int64))
        self.steps = 0

    def run(self) -> None:
        end = len(self.entry.instructions)
        while (going := self.pc < end).any():
            ready = going & ~self.waits
            if not ready.any():
                self.waits[:] = False  # all that are not done have come to the barrier
                continue
            place = int(self.pc[ready].min())
            mask = ready & (self.pc == place)
            self.pc[mask] = place + 1
            self.steps += 1
            self._step(self.entry.instructions[place], mask)
            assert self.steps < 200_000, "the kernel does not end"

    def _step(self, instruction: PtxInstruction, mask: Lanes) -> None:
        position = position_of(instruction)
        taken = mask
        if instruction.guard is not None:
            taken = mask & (self._register(instruction.guard).astype(bool) != instruction.guard_is_negated)
        if position:
            self.reached[position] += mask if position == "branch" else taken
        if not taken.any():
            return
        first, *rest = instruction.parts
        kind = next((part for part in reversed(rest) if part in DTYPES or part == "pred"), "b32")
        method = getattr(self, f"_{first}", None)
        assert method is not None, f"unknown instruction {instruction.opcode}"
        method(instruction, rest, kind, taken)

    # Operands

    def _register(self, name: str) -> Lanes:
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, np.uint64)
        return self.registers[name]

    def _bits(self, operand: str) -> Lanes:
        if operand == "%clock64":
            return np.full(self.count, self.steps, np.uint64)
        if operand in self.special:
            return self.special[operand].astype(np.uint64)
        if operand.startswith("%"):
            return self._register(operand)
        if operand in self.symbols:
            return np.full(self.count, self.symbols[operand], np.uint64)
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return np.full(self.count, int(found[1], 16), np.uint64)
        return np.full(self.count, int(operand, 0) & (2**64 - 1), np.uint64)

    def _value(self, operand: str, kind: str) -> Lanes:
        if kind == "pred":
            return self._bits(operand).astype(bool)
        dtype = np.dtype(DTYPES[kind])
        return self._bits(operand).astype(f"u{dtype.itemsize}").view(dtype)

    def _set(self, name: str, value: Lanes, mask: Lanes) -> None:
        assert name.startswith("%"), name
        if value.dtype == bool:
            raw = value.astype(np.uint64)
        else:
            raw = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").astype(np.uint64)
        self._register(name)[mask] = raw[mask]

    # Moving

    def _mov(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        to, value = ins.operands
        if value.startswith("{"):
            low, high = vector(value)
            joined = self._value(low, "b16").astype(np.uint32) | self._value(high, "b16").astype(np.uint32) << 16
            self._set(to, joined, mask)
        elif to.startswith("{"):
            words = self._value(value, "b32")
            for place, name in enumerate(vector(to)):
                self._set(name, (words >> np.uint32(16 * place)).astype(np.uint16), mask)
        else:
            self._set(to, self._value(value, kind), mask)

    def _cvta(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self._set(ins.operands[0], self._value(ins.operands[1], "u64"), mask)

    def _cvt(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        to, of = [part for part in rest if part in DTYPES]
        self._set(ins.operands[0], self._value(ins.operands[1], of).astype(DTYPES[to]), mask)

    def _ld(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        base, offset = address(ins.operands[1])
        if rest[0] == "param":
            value = np.full(self.count, self.parameters[base] & (2**64 - 1), np.uint64)
            self._set(ins.operands[0], value.astype(f"u{np.dtype(DTYPES[kind]).itemsize}"), mask)
            return
        size = np.dtype(DTYPES[kind]).itemsize
        begin = self._places(base, offset)  # before a register of it is overwritten
        loaded = [self._load(rest, begin + number * size, size, mask) for number in range(len(vector(ins.operands[0])))]
        for name, value in zip(vector(ins.operands[0]), loaded, strict=True):
            self._set(name, value, mask)

    def _st(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        base, offset = address(ins.operands[0])
        size = np.dtype(DTYPES[kind]).itemsize
        begin = self._places(base, offset)
        for number, name in enumerate(vector(ins.operands[1])):
            memory, at = self._memory(rest, begin + number * size)
            raw = self._bits(name).astype(f"u{size}")
            for lane in np.flatnonzero(mask):
                memory[at[lane] : at[lane] + size] = np.frombuffer(raw[lane].tobytes(), np.uint8)

    def _places(self, base: str, offset: int) -> Lanes:
        return self._bits(base).astype(np.int64) + offset

    def _memory(self, rest: list[str], at: Lanes) -> tuple[Lanes, Lanes]:
        if "global" in rest:
            return self.device.bytes, at - self.device.base
        assert "shared" in rest, rest
        return self.shared, at & 0xFFFFFFFF

    def _load(self, rest: list[str], begin: Lanes, size: int, mask: Lanes) -> Lanes:
        memory, at = self._memory(rest, begin)
        found = np.zeros(self.count, f"u{size}")
        for lane in np.flatnonzero(mask):
            assert 0 <= at[lane] <= len(memory) - size, f"thread {lane} reads outside of memory"
            found[lane] = np.frombuffer(memory[at[lane] : at[lane] + size].tobytes(), f"u{size}")[0]
        return found

    def _cp(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        if rest[1] in ("commit_group", "wait_group", "wait_all"):
            return
        to, of = (self._places(*address(operand)) for operand in ins.operands[:2])
        size = int(ins.operands[2], 0)
        read = self._bits(ins.operands[3]).astype(int) if len(ins.operands) > 3 else np.full(self.count, size)
        for lane in np.flatnonzero(mask):
            source = self.device.bytes[of[lane] - self.device.base :][: read[lane]]
            self.shared[to[lane] : to[lane] + size] = 0
            self.shared[to[lane] : to[lane] + len(source)] = source

    # Computing

    def _two(self, ins: PtxInstruction, kind: str) -> tuple[Lanes, Lanes]:
        return self._value(ins.operands[1], kind), self._value(ins.operands[2], kind)

    def _add(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one + other, mask)

    def _sub(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one - other, mask)

    def _neg(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self._set(ins.operands[0], -self._value(ins.operands[1], kind), mask)

    def _product(self, ins: PtxInstruction, rest: list[str], kind: str) -> tuple[Lanes, str]:
        one, other = self._two(ins, kind)
        wide = f"{kind[0]}64" if "wide" in rest else kind
        return one.astype(DTYPES[wide]) * other.astype(DTYPES[wide]), wide

    def _mul(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        assert "hi" not in rest
        self._set(ins.operands[0], self._product(ins, rest, kind)[0], mask)

    def _mad(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        value, wide = self._product(ins, rest, kind)
        self._set(ins.operands[0], value + self._value(ins.operands[3], wide), mask)

    def _fma(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other, third = (self._value(each, kind).astype(np.float64) for each in ins.operands[1:])
        self._set(ins.operands[0], (one * other + third).astype(DTYPES[kind]), mask)

    def _div(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one / np.where(other == 0, 1, other), mask)

    def _ex2(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self._set(ins.operands[0], np.exp2(self._value(ins.operands[1], kind)), mask)

    def _max(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self._set(ins.operands[0], np.fmax(*self._two(ins, kind)), mask)

    def _min(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self._set(ins.operands[0], np.fmin(*self._two(ins, kind)), mask)

    def _and(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one & other, mask)

    def _or(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one | other, mask)

    def _xor(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], one ^ other, mask)

    def _shl(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        value, by = self._value(ins.operands[1], kind), self._value(ins.operands[2], "u32")
        self._set(ins.operands[0], value << by.astype(value.dtype), mask)

    def _shr(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        value, by = self._value(ins.operands[1], kind), self._value(ins.operands[2], "u32")
        self._set(ins.operands[0], value >> by.astype(value.dtype), mask)

    def _bfe(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        value = self._value(ins.operands[1], "u32").astype(np.int64)
        begin, count = (self._value(each, "u32").astype(np.int64) for each in ins.operands[2:])
        field = value >> begin & (1 << count) - 1
        if kind == "s32":
            field -= (field >> (count - 1) & 1) << count
        self._set(ins.operands[0], field.astype(DTYPES[kind]), mask)

    def _setp(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
                   "ne": np.not_equal}[rest[0]]  # fmt: skip
        found = compare(one, other)
        if len(ins.operands) > 3:
            also = self._register(ins.operands[3].lstrip("!")).astype(bool) != ins.operands[3].startswith("!")
            assert rest[1] == "and"
            found = found & also
        self._set(ins.operands[0], found, mask)

    def _selp(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        one, other = self._two(ins, kind)
        self._set(ins.operands[0], np.where(self._register(ins.operands[3]).astype(bool), one, other), mask)

    # Going elsewhere

    def _bra(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self.pc[mask] = self.entry.labels[ins.operands[0]]

    def _ret(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self.pc[mask] = len(self.entry.instructions)

    def _bar(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        self.waits |= mask

    # Warps together

    def _warps(self, mask: Lanes) -> Lanes:
        """The lanes of each warp that takes part, whole: (warps, 32)."""
        whole = mask.reshape(-1, 32)
        assert (whole.all(axis=1) | ~whole.any(axis=1)).all(), "a warp takes part in parts"
        return self.lane.reshape(-1, 32)[whole.all(axis=1)]

    def _shfl(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        assert "bfly" in rest
        value = self._value(ins.operands[1], "b32").copy()
        for lanes in self._warps(mask):
            value[lanes] = value[lanes ^ int(ins.operands[2], 0)]
        self._set(ins.operands[0].partition("|")[0], value, mask)

    def _ldmatrix(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        names = vector(ins.operands[0])
        begin = self._places(*address(ins.operands[1])) & 0xFFFFFFFF
        found = [np.zeros(self.count, np.uint32) for _name in names]
        for lanes in self._warps(mask):
            for number in range(len(names)):
                rows = [self.shared[at : at + 16].view(np.uint16) for at in begin[lanes[8 * number : 8 * number + 8]]]
                matrix = np.array(rows).T if "trans" in rest else np.array(rows)
                found[number][lanes] = np.ascontiguousarray(matrix).view(np.uint32).ravel()
        for name, value in zip(names, found, strict=True):
            self._set(name, value, mask)

    def _mma(self, ins: PtxInstruction, rest: list[str], kind: str, mask: Lanes) -> None:
        assert rest[2:] == ["m16n8k16", "row", "col", "f32", "f16", "f16", "f32"], rest
        out, *of = (vector(operand) for operand in ins.operands)
        a, b = ([self._value(name, "b32") for name in names] for names in of[:2])
        c = [self._value(name, "f32") for name in of[2]]
        results = [each.copy() for each in c]
        group, inner = np.arange(32) // 4, np.arange(32) % 4 * 2
        for lanes in self._warps(mask):
            left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
            total = np.zeros((16, 8), np.float32)
            for place, each in enumerate(a):
                for half in range(2):
                    left[group + 8 * (place % 2), inner + 8 * (place // 2) + half] = _half(each[lanes], half)
            for place, each in enumerate(b):
                for half in range(2):
                    right[inner + 8 * place + half, group] = _half(each[lanes], half)
            for place, each in enumerate(c):
                total[group + 8 * (place // 2), inner + place % 2] = each[lanes]
            total = total + left @ right
            for place, each in enumerate(results):
                each[lanes] = total[group + 8 * (place // 2), inner + place % 2]
        for name, value in zip(out, results, strict=True):
            self._set(name, value, mask)


def _half(words: Lanes, half: int) -> Lanes:
    return (words >> np.uint32(16 * half)).astype(np.uint16).view(np.float16).astype(np.float32)
