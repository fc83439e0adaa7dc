"""Programs as lists of ops, which tests edit at random while they keep track of which op is which; and their traces."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from replayfmt.compare.trace import Trace

U = np.uint64


@dataclass(frozen=True)
class Op:
    """`name` is the op's own for ever, also in an edited program. `reads` and `writes` name values."""

    name: int
    key: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    loose: int = 0  # 0: as the key
    twin: int = 0  # the op that it repeats

    @property
    def kernel(self) -> int:
        return self.loose or self.key


@dataclass
class Program:
    """`outside` are the values from outside: content (0: unknown) and length, by name. Names are never used again."""

    ops: list[Op]
    outside: dict[int, tuple[int, int]]
    next_name: int = 1 << 20

    def new(self) -> int:
        self.next_name += 1
        return self.next_name

    def trace(self, *, digests: bool = False) -> Trace:
        """`digests`: of all that is read."""
        count = [len(op.reads) for op in self.ops]
        made = [len(op.writes) for op in self.ops]
        read = {value for op in self.ops for value in op.reads} & self.outside.keys()
        first_use: dict[int, int] = {}
        for place, op in enumerate(self.ops):
            for value in op.reads:
                if value in read:
                    first_use.setdefault(value, place)
        events = sorted(
            [(2 * place + 1, value, place) for place, op in enumerate(self.ops) for value in op.writes]
            + [(2 * first_use[value] - 1, value, -1) for value in read]
        )
        number = {value: place for place, (_time, value, _op) in enumerate(events)}
        reads = [number[value] for op in self.ops for value in op.reads]
        none, empty = np.zeros(len(reads), U), np.zeros(0, np.int64)
        meaning = self.meanings()[1] if digests else {}
        direct = np.array([meaning.get(value, 0) % (1 << 64) for op in self.ops for value in op.reads], U)
        return Trace(
            "program",
            np.arange(len(self.ops)),
            np.array([op.key for op in self.ops], U),
            np.array([op.kernel for op in self.ops], U),
            np.zeros(len(self.ops), U),
            np.zeros(len(self.ops), bool),
            np.zeros(len(self.ops), U),
            np.concatenate(([0], np.cumsum(count))).astype(np.int64),
            np.array(reads, np.int64),
            np.full(len(reads), -1),
            direct,
            none,
            np.concatenate(([0], np.cumsum(made))).astype(np.int64),
            np.array([number[value] for op in self.ops for value in op.writes], np.int64),
            np.array([op for _time, _value, op in events], np.int64),
            np.array([self.outside[value][0] if op < 0 else 0 for _time, value, op in events], U),
            np.array([self.outside[value][1] if op < 0 else 0 for _time, value, op in events], np.int64),
            np.arange(len(events)),
            np.full(len(events), -1),
            np.zeros(len(events), bool),
            np.zeros(len(events), bool),
            empty,
            empty,
            none[:0],
            none[:0],
            empty,
        )

    def meanings(self) -> tuple[dict[int, int], dict[int, int]]:
        """What ops compute and values are, as a hash of all that leads to them; by name."""
        values = {value: hash(("outside", value)) for value in self.outside}
        ops = {}
        for op in self.ops:
            ops[op.name] = hash((op.key, *(values[value] for value in op.reads)))
            values.update((value, hash((ops[op.name], place))) for place, value in enumerate(op.writes))
        return ops, values


def layered(dice: random.Random, layers: int, *, contents: bool, kinds: int = 4) -> Program:
    """Layers with parameters, a residual connection and a chain of unary ops, of few kinds: much looks alike."""
    program = Program([], {1: (77 if contents else 0, 64)}, next_name=100)
    value, last = 1, 1
    for layer in range(layers):
        weight, bias = program.new(), program.new()
        program.outside[weight] = (1000 + layer if contents else 0, 256)
        program.outside[bias] = (5000 + layer if contents else 0, 16)
        for key, reads in (
            (10, (bias, value, weight)),
            *((20 + dice.randrange(kinds), ()) for _ in range(3)),
            (30, (last,)),
        ):
            out = program.new()
            program.ops.append(Op(program.new(), key, (*reads, *(() if key == 10 else (value,))), (out,)))
            value = out
        last = value
        if dice.random() < 0.2:
            source, mask = program.new(), program.new()
            program.ops.append(Op(program.new(), 40, (), (source,)))
            program.ops.append(Op(program.new(), 41, (value, source), (mask,)))
            value = mask
    return program


def edited(program: Program, dice: random.Random, edits: int) -> Program:
    """The program with random edits. Ops that stay what they are keep their names."""
    made = Program(list(program.ops), dict(program.outside), program.next_name + 1000)
    for _ in range(edits):
        getattr(_Edits, dice.choice(("insert", "delete", "duplicate", "swap", "split", "change")))(made, dice)
    return made


class _Edits:
    @staticmethod
    def _redirect(program: Program, start: int, old: int, new: int) -> None:
        """Later ops read another value."""
        for place in range(start, len(program.ops)):
            op = program.ops[place]
            if old in op.reads:
                program.ops[place] = replace(op, reads=tuple(new if each == old else each for each in op.reads))

    @staticmethod
    def _written(program: Program) -> list[int]:
        return [place for place, op in enumerate(program.ops) if op.writes]

    @staticmethod
    def insert(program: Program, dice: random.Random) -> None:
        """An op between another and its readers, or beside them."""
        place = dice.choice(_Edits._written(program))
        value, out = program.ops[place].writes[0], program.new()
        before = [each for each in _Edits._written(program) if each <= place]
        others = [program.ops[dice.choice(before)].writes[0]] if dice.random() < 0.3 else []
        alike = [(op.key, op.loose) for op in program.ops if len(op.reads) == 1 == len(op.writes)]
        key, loose = dice.choice([(50, 0), *alike])
        if dice.random() < 0.7:
            _Edits._redirect(program, place + 1, value, out)
        program.ops.insert(place + 1, Op(program.new(), key, (value, *others), (out,), loose))

    @staticmethod
    def delete(program: Program, dice: random.Random) -> None:
        """An op is left out; its readers read what it read."""
        places = [place for place, op in enumerate(program.ops) if op.reads and len(op.writes) == 1]
        place = dice.choice(places)
        op = program.ops.pop(place)
        _Edits._redirect(program, place, op.writes[0], op.reads[-1])

    @staticmethod
    def duplicate(program: Program, dice: random.Random) -> None:
        """An op is done once more, and perhaps its second result is used."""
        place = dice.choice([place for place in _Edits._written(program) if len(program.ops[place].writes) == 1])
        op = program.ops[place]
        out = program.new()
        if dice.random() < 0.5:
            _Edits._redirect(program, place + 1, op.writes[0], out)
        program.ops.insert(place + 1, replace(op, name=program.new(), writes=(out,), twin=op.twin or op.name))

    @staticmethod
    def swap(program: Program, dice: random.Random) -> None:
        """Two independent neighbours change places."""
        place = dice.randrange(len(program.ops) - 1)
        one, other = program.ops[place : place + 2]
        if not set(one.writes) & set(other.reads):
            program.ops[place : place + 2] = [other, one]

    @staticmethod
    def split(program: Program, dice: random.Random) -> None:
        """A composite op becomes two parts."""
        places = [place for place, op in enumerate(program.ops) if len(op.reads) > 1 and len(op.writes) == 1]
        if places:
            place = dice.choice(places)
            op = program.ops[place]
            between = program.new()
            parts = [
                Op(program.new(), 60, op.reads[1:], (between,)),
                Op(program.new(), 61, (between, op.reads[0]), op.writes),
            ]
            program.ops[place : place + 1] = parts

    @staticmethod
    def change(program: Program, dice: random.Random) -> None:
        """An op is called with another number: still the same op."""
        place = dice.randrange(len(program.ops))
        op = program.ops[place]
        program.ops[place] = replace(op, key=op.key ^ 4096, loose=op.kernel)


def wrong_pairs(one: Program, other: Program, partner: list[int]) -> list[tuple[Op, Op]]:
    """The pairs that are not what the edits say. Ops that compute the same are interchangeable: with equal meanings, or
    of one kernel on corresponding inputs, or where the op of `other` is called just as the known one."""
    meanings, values = one.meanings()
    its_meanings, its_values = other.meanings()
    known = {op.name: op for op in other.ops}
    same: dict[int, int] = {}  # values of `one` that are others in `other`

    def alike(value: int, each: int) -> bool:
        return value == each or same.get(value) == each or values[value] == its_values[each]

    wrong = []
    for place, counterpart in enumerate(partner):
        if counterpart < 0:
            continue
        op, its = one.ops[place], other.ops[counterpart]
        true = known.get(op.name)
        corresponding = len(op.reads) == len(its.reads) and all(map(alike, op.reads, its.reads))
        repeats = (
            true is not None
            and true.key == its.key
            and [its_values[value] for value in true.reads] == [its_values[value] for value in its.reads]
        )
        if (
            op.name in (its.name, its.twin)
            or meanings[op.name] in (its_meanings[its.name], meanings.get(its.name))
            or (op.kernel == its.kernel and corresponding)
            or repeats
        ):
            same.update(zip(op.writes, its.writes, strict=False))
        else:
            wrong.append((op, its))
    return wrong


def program_of(trace: Trace) -> Program:
    """A capture's ops, to be edited; values keep their numbers as names."""
    names = range(1_000_000, 1_000_000 + trace.ops)
    ops = [
        Op(
            names[op],
            int(trace.key[op]) ^ int(trace.randomness[op]),  # what an op draws is part of what it computes
            tuple(trace.read_value[trace.read_first[op] : trace.read_first[op + 1]].tolist()),
            tuple(trace.writes[trace.write_first[op] : trace.write_first[op + 1]].tolist()),
            int(trace.loose[op]),
        )
        for op in range(trace.ops)
    ]
    outside = {
        value: (int(trace.value_content[value]), int(trace.value_bytes[value]))
        for value in np.flatnonzero(trace.value_op < 0).tolist()
    }
    return Program(ops, outside, next_name=2_000_000)
