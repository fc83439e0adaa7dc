"""Which op of one capture is which op of another: by what they compute, not by names and ids.

First, ops that are the same function of the same inputs from outside are pairs, wherever they are (`_same_function`):
each op gets a hash of its key and of the hashes of what it reads, back to what entered the capture. That finds
everything before the first change, and what is only reordered. `_same_content` does the same by the digests of what is
read, and so finds again what is equal behind a change. Then `_Pairing` goes through what is left, in order. An
op pairs with one of equal key that reads the same values, or else with one of the same kernel that does. Where no such
pair is near, a window of both is aligned by its longest common subsequence. A pair of that is accepted only if no other
such subsequence contradicts, its inputs come from the same values through the ops that were skipped, and what reads its
results goes on alike. Where nothing can be accepted the alignment is doubtful, and says so.

What remains are ops of one capture alone. Those that stand for each other (a composite op and its parts, a compiled
region and its operators) are `blocks`: connected by data flow, with the values that leave them for paired ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from replayfmt.collector import collector_paused

from .trace import UNINITIALIZED, UNKNOWN, Trace, U

_NEAR = 48  # unpaired ops that are looked through for one that reads the same values
_WINDOWS = (48, 192, 768)  # ops of both captures that are aligned where there is none
_MOST_ROOTS = 16  # of values that are looked at for a pair that may be one; of one that seems to be, all are
_MUCH = 0.9  # share of the ops of the smaller capture that should have a partner
_ALIKE = 0.8  # share of the roots of two values with many that has to be common
_COMPARED_PAIRS = 30_000
_DEEP_LOOKS = 100  # places where many ops without a partner are looked through; each takes a fifth of a second
_FOLLOWED = 3  # steps along the data flow that have to be alike behind a pair that is accepted at a change


@dataclass(frozen=True)
class Block:
    """Ops of one or both captures without a partner, connected by data flow. `outputs` pairs values of a and b of which
    one or both leave the block: paired ops read them at the same place, memory of both holds them at the end, or the
    program itself gets them (`_ends`). `unmatched`: it gets values of both that are not among these."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    unmatched: bool = False


@dataclass
class Alignment:
    """`partner_of_a[i]` is the op of b that op i of a is, -1 for none, and reversed. `exact[i]`: with equal keys.
    `doubts` are places (op of a, op of b) behind which the order alone did not tell what belongs together."""

    partner_of_a: np.ndarray
    partner_of_b: np.ndarray
    exact: np.ndarray
    doubts: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        return int((self.partner_of_a >= 0).sum())

    @property
    def share(self) -> float:
        """The aligned share of all ops of both."""
        both = len(self.partner_of_a) + len(self.partner_of_b)
        return 2 * self.pairs / both if both else 1.0


@collector_paused()
def align(a: Trace, b: Trace) -> Alignment:
    """Align two captures. What came from outside is the same if its content is, first of all; where that leaves much
    without a partner, it is the same by order as well: data may have been swapped. What is still left is looked for
    behind many ops."""
    sides, doubts = _aligned(a, b)
    for way in ({"by_order": True}, {"looks": _DEEP_LOOKS}, {"by_order": True, "looks": _DEEP_LOOKS}):
        if not doubts and sides[0].pairs > _MUCH * min(a.ops, b.ops):
            break
        others, its_doubts = _aligned(a, b, **way)
        if others[0].pairs > sides[0].pairs:
            sides, doubts = others, its_doubts
    one, other = sides
    partner = np.array(one.partner, np.int64)
    exact = (partner >= 0) & (a.key == b.key[np.maximum(partner, 0)]) if len(b.key) else partner >= 0
    found = Alignment(partner, np.array(other.partner, np.int64), exact, doubts)
    found.blocks = _blocks(*sides)
    return found


def _aligned(
    a: Trace, b: Trace, *, by_order: bool = False, looks: int = 0
) -> tuple[tuple[_Side, _Side], list[tuple[int, int]]]:
    """Both captures with their partners, and the doubts."""
    sides = _Side(a, 0), _Side(b, 1)
    _name_outside(*sides, by_order=by_order)
    _same_function(*sides, by_order=by_order)
    doubts = _pair_between(*sides, _same_content(*sides), looks)
    _pair_sources(*sides)
    return sides, doubts


def align_recorded(a: Trace, b: Trace) -> Alignment:
    """The alignment of captures of the same ops in the same order."""
    return Alignment(np.arange(a.ops), np.arange(a.ops), a.key == b.key)


class _Side:
    """One capture. `label` names each value: equal for values that correspond, otherwise of one's own."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number
        self.key: list[int] = trace.key.tolist()
        self.loose: list[int] = trace.loose.tolist()
        self.form: list[int] = trace.form.tolist()
        self.first: list[int] = trace.read_first.tolist()
        self.reads: list[int] = trace.read_value.tolist()
        self.write_first: list[int] = trace.write_first.tolist()
        self.writes: list[int] = trace.writes.tolist()
        self.value_op: list[int] = trace.value_op.tolist()
        self.label: list[int] = [-2 * value - 1 - number for value in range(len(trace.value_op))]
        self.partner: list[int] = [-1] * trace.ops

    @property
    def pairs(self) -> int:
        return sum(partner >= 0 for partner in self.partner)

    def read_by(self, op: int) -> list[int]:
        return self.reads[self.first[op] : self.first[op + 1]]

    @cached_property
    def users(self) -> tuple[list[int], list[int]]:
        """The reads of each value: where they begin, and (op, place among its reads) of all as one number."""
        value = self.trace.read_value
        order = np.argsort(value, kind="stable")
        op = np.repeat(np.arange(self.trace.ops), np.diff(self.trace.read_first))
        place = np.arange(len(value)) - self.trace.read_first[op]
        first = np.searchsorted(value[order], np.arange(len(self.value_op) + 1))
        return first.tolist(), (op << 16 | np.minimum(place, 0xFFFF))[order].tolist()

    @cached_property
    def _contents(self) -> np.ndarray:
        return np.unique(self.trace.value_content)

    def has_content(self, content: int) -> bool:
        """Whether any value has this content, if it is known."""
        place = int(np.searchsorted(self._contents, U(content)))
        return content > UNINITIALIZED and place < len(self._contents) and int(self._contents[place]) == content

    def used_by(self, value: int) -> list[int]:
        first, users = self.users
        return users[first[value] : first[value + 1]]

    def written_by(self, op: int) -> list[int]:
        return self.writes[self.write_first[op] : self.write_first[op + 1]]

    def leading_to(self, op: int, value: int) -> list[int]:
        """What an op reads that a value which it writes may come from."""
        reads, elements = self.read_by(op), self.trace.elements.get(op)
        if elements is None:
            return reads
        storage, written = self.trace.value_storage, self.written_by(op)
        own = {element for element, read in zip(elements, reads, strict=True) if storage[read] == storage[value]}
        if not own and len(written) == max(elements) + 1:
            own = {written.index(value)}
        return [read for element, read in zip(elements, reads, strict=True) if not own or element < 0 or element in own]

    def is_source(self, op: int) -> bool:
        """Whether it reads nothing, so that only its consumers tell which one it is."""
        return self.first[op] == self.first[op + 1]

    def is_alone(self, op: int) -> bool:
        """Whether it has no partner, and does not just compute again what an op of both captures does."""
        written = self.written_by(op)
        return self.partner[op] < 0 and not (written and all(map(self.shared, written)))

    def shared(self, value: int) -> bool:
        return self.label[value] >= 0


def _name_outside(a: _Side, b: _Side, *, by_order: bool) -> None:
    """Label the values that came from outside: by content; those that are left, by order, where both captures have as
    many of one length. `by_order`: also those of a length of which not all have the same order in both."""
    groups: list[dict[tuple[int, int], list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, group in zip((a, b), groups, strict=True):
        for value in np.flatnonzero(side.trace.value_op < 0).tolist():
            group[int(side.trace.value_content[value]), int(side.trace.value_bytes[value])].append(value)
    number = 1
    left: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
    crossing = set()
    if by_order:
        last: dict[int, int] = defaultdict(int)
        for key in sorted(groups[0], key=groups[0].__getitem__):
            its = groups[1].get(key, [0])[0]
            if its < last[key[1]]:
                crossing.add(key[1])
            last[key[1]] = its
    for key in sorted(groups[0].keys() | groups[1].keys()):
        both = [group.get(key, []) for group in groups]
        if key[0] != UNKNOWN and all(both) and key[1] not in crossing:
            # The same bytes: which of them is meant does not matter for what is computed.
            for side, values in zip((a, b), both, strict=True):
                for place, value in enumerate(values):
                    side.label[value] = number + min(place, min(map(len, both)) - 1)
            number += min(map(len, both))
        else:
            for rest, values in zip(left, both, strict=True):
                rest[key[1]] += values
    for length in sorted(left[0].keys() & left[1].keys()):
        one, other = sorted(left[0][length]), sorted(left[1][length])
        if len(one) == len(other):
            for place, (value, counterpart) in enumerate(zip(one, other, strict=True)):
                a.label[value] = b.label[counterpart] = number + place
            number += len(one)


def _pair(a: _Side, b: _Side, op: int, other: int) -> None:
    a.partner[op], b.partner[other] = other, op
    for value, counterpart in zip(a.written_by(op), b.written_by(other), strict=False):
        if a.label[value] != b.label[counterpart]:
            a.label[value] = b.label[counterpart] = (value + 1) << 32


def _same_function(a: _Side, b: _Side, *, by_order: bool) -> None:
    """Pair ops with equal hashes of themselves and all that led to them, in order. What they write is the same value,
    however often an op is repeated. `by_order`: whatever the state of the random generators is."""
    found: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, groups in zip((a, b), found, strict=True):
        hashes = list(side.label)
        first, reads = side.first, side.reads
        random = (side.trace.randomness * U(not by_order)).tolist()
        write_first, writes = side.write_first, side.writes
        for op, key in enumerate(side.key):
            h = hash((key, random[op], *[hashes[value] for value in reads[first[op] : first[op + 1]]]))
            for place in range(write_first[op], write_first[op + 1]):
                hashes[writes[place]] = hash((h, place - write_first[op]))
            groups[h].append(op)
    pairs: list[tuple[int, int]] = []
    for h, ops in found[0].items():
        others = found[1].get(h)
        if others is None:
            continue
        if not a.is_source(ops[0]):
            pairs += zip(ops, others, strict=False)
        labels = [(value + 1) << 32 for value in a.written_by(ops[0])]  # those of values from outside are below
        for side, members in ((a, ops), (b, others)):
            for op in members:
                for value, label in zip(side.written_by(op), labels, strict=False):
                    side.label[value] = label
    for op, other in pairs:
        a.partner[op], b.partner[other] = other, op
    for op, other in pairs:
        _pair_read_sources(a, b, op, other)


def _same_content(a: _Side, b: _Side) -> list[tuple[int, int]]:
    """Pair what is left of ops of equal key that read the same bytes: behind a change that computes the same (one op
    for all parameters in place of one for each) everything is equal again. Those of which there is one, in order, are
    anchors, which are returned; others are paired between these."""
    found = []
    for side in (a, b):
        trace = side.trace
        read = np.where(trace.direct > 0, trace.direct, trace.derived)
        known = np.concatenate(([0], np.cumsum(read > 0)))
        whole = np.diff(known[trace.read_first]) == np.diff(trace.read_first)
        contents, random = read.tolist(), trace.randomness.tolist()
        hashes = {}
        for op in np.flatnonzero(whole & (np.array(side.partner, np.int64) < 0)).tolist():
            if not side.is_source(op):
                reads = contents[side.first[op] : side.first[op + 1]]
                hashes[op] = hash((side.key[op], random[op], *reads))
        found.append(hashes)
    anchors: list[tuple[int, int]] = []
    for most in (1, a.trace.ops + b.trace.ops):
        groups: list[dict[tuple[int, int], list[int]]] = [defaultdict(list), defaultdict(list)]
        for place, (side, hashes, group) in enumerate(zip((a, b), found, groups, strict=True)):
            bounds = [pair[place] for pair in anchors]
            for op, h in hashes.items():
                if side.partner[op] < 0:
                    group[h, bisect_left(bounds, op)].append(op)
        pairs: list[tuple[int, int]] = []
        for key, ops in groups[0].items():
            others = groups[1].get(key, [])
            if max(len(ops), len(others)) <= most:
                pairs += zip(ops, others, strict=False)
        pairs = _in_order(sorted(pairs))
        anchors = anchors or pairs
        for op, other in pairs:
            _pair_read_sources(a, b, op, other)
            _pair(a, b, op, other)
    return anchors


def _pair_between(a: _Side, b: _Side, anchors: list[tuple[int, int]], looks: int) -> list[tuple[int, int]]:
    """Pair what is left between each two anchors; the doubts behind the last one. Between anchors there are none: what
    is behind the second one is certain."""
    gaps: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, side in enumerate((a, b)):
        bounds = [pair[place] for pair in anchors]
        for op, partner in enumerate(side.partner):
            if partner < 0 and not side.is_source(op):
                gaps[bisect_left(bounds, op)][place].append(op)
    doubts: list[tuple[int, int]] = []
    for gap, (ops, others) in gaps.items():
        if ops and others:
            pairing = _Pairing(a, b, ops, others, bounded=gap < len(anchors), looks=looks)
            doubts += pairing.run()
            looks = pairing.looks
    return doubts


def _in_order(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most of these pairs, which are in the order of their first places, that are in the order of their second ones
    as well."""
    ends: list[int] = []  # of the runs of each length, the smallest last place, and its pair
    at: list[int] = []
    before: list[int] = []
    for number, (_op, other) in enumerate(pairs):
        length = bisect_left(ends, other)
        ends[length : length + 1] = [other]
        at[length : length + 1] = [number]
        before.append(at[length - 1] if length else -1)
    found = []
    number = at[-1] if at else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]


def _pair_read_sources(a: _Side, b: _Side, op: int, other: int) -> None:
    """Pair the sources that two paired ops read at the same place."""
    for value, counterpart in zip(a.read_by(op), b.read_by(other), strict=False):
        source, its = a.value_op[value], b.value_op[counterpart]
        if source >= 0 and its >= 0 and _are_sources(a, b, source, its) and a.loose[source] == b.loose[its]:
            _pair(a, b, source, its)


def _are_sources(a: _Side, b: _Side, op: int, other: int) -> bool:
    """Whether both are unpaired and read nothing."""
    return a.partner[op] < 0 and b.partner[other] < 0 and a.is_source(op) and b.is_source(other)


def _pair_sources(a: _Side, b: _Side) -> None:
    """Pair what is left of ops that read nothing, in order, where both captures have as many of one key."""
    groups: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, group in zip((a, b), groups, strict=True):
        for op, partner in enumerate(side.partner):
            if partner < 0 and side.is_source(op):
                group[side.key[op]].append(op)
    for key, ops in groups[0].items():
        others = groups[1].get(key, [])
        if len(ops) == len(others):
            for op, other in zip(ops, others, strict=True):
                _pair(a, b, op, other)


class _Unpaired:
    """The ops of one capture that were not paired at first, in order; those that have been since are passed over, in
    constant time on average: `_ahead` is where to look next, shortened at each look."""

    def __init__(self, side: _Side, ops: list[int]) -> None:
        self.ops = ops
        self._partner = side.partner
        self._ahead = list(range(1, len(self.ops) + 1))
        self._furthest = 0  # place that was paired

    def first(self, place: int) -> int:
        """The first place from here on to pair: what was passed over is left alone when pairs are far beyond it."""
        return self.next(max(place, self._furthest - _NEAR))

    def note_paired(self, op: int) -> None:
        self._furthest = max(self._furthest, bisect_left(self.ops, op))

    def next(self, place: int) -> int:
        """The first place from here on with an unpaired op; the number of places if there is none."""
        ops, partner, ahead, found = self.ops, self._partner, self._ahead, place
        while found < len(ops) and partner[ops[found]] >= 0:
            found = ahead[found]
        while place < found:
            ahead[place], place = found, ahead[place]
        return found

    def near(self, place: int, count: int = _NEAR) -> Iterator[int]:
        """The next unpaired ops after a place."""
        while count and (place := self.next(place + 1)) < len(self.ops):
            count -= 1
            yield self.ops[place]


class _Pairing:
    """Goes through unpaired ops of both captures in order. `bounded`: they are all there are up to a certain pair.
    `looks` is how many deep looks are left."""

    def __init__(self, a: _Side, b: _Side, ops: list[int], others: list[int], *, bounded: bool, looks: int) -> None:
        self.a, self.b, self.bounded, self.looks = a, b, bounded, looks
        self.left_a, self.left_b = _Unpaired(a, ops), _Unpaired(b, others)
        self.doubts: list[tuple[int, int]] = []

    def run(self) -> list[tuple[int, int]]:
        i = j = 0
        while True:
            i, j = self.left_a.first(i), self.left_b.first(j)
            if i == len(self.left_a.ops) or j == len(self.left_b.ops):
                return self.doubts
            op, other = self.left_a.ops[i], self.left_b.ops[j]
            found = (op, other) if self._equal(op, other) else self._near_pair(i, j)
            if found is not None:
                self._take(*found)
                continue
            further = self._beyond(i, j) or self._behind_views(i, j)
            if further is None and self.looks:
                self.looks -= 1
                further = self._beyond(i, j, deep=True)
            if further is None and self.bounded:
                return self.doubts
            if further is None:
                self.doubts.append((op, other))
                further = self._jump(i, j)
            i, j = further

    def _near_pair(self, i: int, j: int) -> tuple[int, int] | None:
        """The pair of the next op of either capture with one of the other that reads the same values."""
        op, other = self.left_a.ops[i], self.left_b.ops[j]
        ops, others = [op], [other]
        for y in self.left_b.near(j):
            if self._equal(op, y):
                return op, y
            others.append(y)
        for x in self.left_a.near(i):
            if self._equal(x, other):
                return x, other
            ops.append(x)
        # Other numbers, sizes or dtypes: if no exact partner is near.
        for y in others:
            if self._alike(op, y) and not any(self._equal(x, y) for x in ops):
                return op, y
        for x in ops:
            if self._alike(x, other) and not any(self._equal(x, y) for y in others):
                return x, other
        return None

    def _take(self, op: int, other: int) -> None:
        _pair_read_sources(self.a, self.b, op, other)
        _pair(self.a, self.b, op, other)
        self.left_a.note_paired(op)
        self.left_b.note_paired(other)

    def _same_value(self, value: int, counterpart: int) -> bool:
        a, b = self.a, self.b
        if a.label[value] == b.label[counterpart]:
            return True
        source, its = a.value_op[value], b.value_op[counterpart]
        return source >= 0 and its >= 0 and _are_sources(a, b, source, its) and a.loose[source] == b.loose[its]

    def _equal(self, op: int, other: int, loose: bool = False) -> bool:
        """Whether both are of one key (`loose`: of one kernel) and read the same values."""
        a, b = self.a, self.b
        if a.loose[op] != b.loose[other] if loose else a.key[op] != b.key[other]:
            return False
        if loose and a.form[op] == b.form[other] and not a.written_by(op):
            return False  # another view of the same memory
        reads, others = a.read_by(op), b.read_by(other)
        return len(reads) == len(others) and all(map(self._same_value, reads, others))

    def _alike(self, op: int, other: int) -> bool:
        """Whether both are of one kernel, read the same values, and are used alike; unless what one of them computes is
        computed by another op of the other capture."""
        if not (self._equal(op, other, loose=True) and self._continues(op, other, steps=1)):
            return False
        a, b = self.a, self.b
        for value, its in zip(a.written_by(op), b.written_by(other), strict=False):
            one, two = int(a.trace.value_content[value]), int(b.trace.value_content[its])
            if one != two and (b.has_content(one) or a.has_content(two)):
                return False
        return True

    def _beyond(self, i: int, j: int, *, deep: bool = False) -> tuple[int, int] | None:
        """Pair the first ops that certainly belong together again; where to go on. `deep`: also behind many ops without
        a partner, as a compiled model is, and not only behind a few."""
        for size, loose in [*((size, False) for size in _WINDOWS), (_WINDOWS[0], True)]:
            ops = [self.left_a.ops[i], *self.left_a.near(i, size)]
            others = [self.left_b.ops[j], *self.left_b.near(j, size)]
            whole = len(ops) <= size and len(others) <= size
            for x, y in self._certain(ops, others, loose, deep):
                if not whole and (x > size // 2 or y > size // 2):
                    break
                if self._compatible(ops[x], others[y], {}, deep=deep) and self._continues(ops[x], others[y]):
                    self._take(ops[x], others[y])
                    return bisect_left(self.left_a.ops, ops[x]), bisect_left(self.left_b.ops, others[y])
        return None

    def _behind_views(self, i: int, j: int) -> tuple[int, int] | None:
        """The places of the next ops that write something: without a partner for a view there is no doubt."""
        found = []
        for left, side, place in ((self.left_a, self.a, i), (self.left_b, self.b, j)):
            while place < len(left.ops) and not side.written_by(left.ops[place]):
                place = left.next(place + 1)
            found.append(place)
        return None if found == [i, j] else (found[0], found[1])

    def _certain(self, ops: list[int], others: list[int], loose: bool, deep: bool) -> list[tuple[int, int]]:
        """The places of pairs that are in every longest common subsequence in which one of them is at all."""
        keys = (self.a.loose, self.b.loose) if loose else (self.a.key, self.b.key)
        equal = np.array([keys[0][op] for op in ops])[:, None] == np.array([keys[1][op] for op in others])
        known: dict[tuple[int, int], set[int] | None] = {}
        if equal.sum() <= _COMPARED_PAIRS:
            for x, y in np.argwhere(equal).tolist():
                equal[x, y] = self._compatible(ops[x], others[y], known, weakly=True, deep=deep) is not False
        before = np.zeros((len(ops) + 1, len(others) + 1), np.int32)
        after = np.zeros_like(before)
        for x in range(len(ops)):
            np.maximum.accumulate(np.maximum(before[x, 1:], before[x, :-1] + equal[x]), out=before[x + 1, 1:])
        for x in reversed(range(len(ops))):
            row = np.maximum(after[x + 1, :-1], after[x + 1, 1:] + equal[x])[::-1]
            after[x, :-1] = np.maximum.accumulate(row)[::-1]
        used = equal & (before[:-1, :-1] + after[1:, 1:] + 1 == before[-1, -1])
        alone = used & (used.sum(1, keepdims=True) == 1) & (used.sum(0, keepdims=True) == 1)
        return [(x, y) for x, y in np.argwhere(alone).tolist()]

    def _compatible(
        self,
        op: int,
        other: int,
        known: dict[tuple[int, int], set[int] | None],
        *,
        weakly: bool = False,
        deep: bool = False,
    ) -> bool | None:
        """Whether what they read is the same, or may come from the same values through ops that have no partner; None
        if nothing of it certainly does. `weakly`: or from ops of one kernel. `deep`: or mostly from the same values, if
        these are many. `known` are roots that were found before."""
        reads, others = self.a.read_by(op), self.b.read_by(other)
        if len(reads) != len(others):
            return False
        some = False
        for value, its in zip(reads, others, strict=True):
            if self._same_value(value, its):
                some = some or self.a.shared(value)
                continue
            if self._same_kernel(value, its):
                if self._rank(self.a, value) != self._rank(self.b, its):
                    return False  # different results of one op
                if weakly:
                    continue
            most = len(self.a.label) if deep and not weakly else _MOST_ROOTS
            roots, its_roots = self._roots(self.a, value, known, most), self._roots(self.b, its, known, most)
            if roots is None or its_roots is None:
                if deep:
                    continue
                return False
            common = roots & its_roots
            few = min(len(roots), len(its_roots))
            if len(common) < (few if few <= _MOST_ROOTS else _ALIKE * len(roots | its_roots)):
                return False
            if self.a.shared(value) and self.b.shared(its):
                return False
            some = some or bool(common)
        return True if some else None

    def _same_kernel(self, value: int, its: int) -> bool:
        op, other = self.a.value_op[value], self.b.value_op[its]
        return (
            op >= 0
            and other >= 0
            and self.a.loose[op] == self.b.loose[other]
            and not (self.a.shared(value) and self.b.shared(its))
        )

    @staticmethod
    def _rank(side: _Side, value: int) -> int:
        return side.written_by(side.value_op[value]).index(value)

    @staticmethod
    def _roots(side: _Side, value: int, known: dict[tuple[int, int], set[int] | None], most: int) -> set[int] | None:
        key = side.number, value
        if key not in known:
            known[key] = _roots(side, value, most)
        return known[key]

    def _continues(self, op: int, other: int, steps: int = _FOLLOWED) -> bool:
        """Whether what reads their results is alike, for some steps."""
        if not steps:
            return True
        a, b = self.a, self.b
        for value, its in zip(a.written_by(op), b.written_by(other), strict=False):
            users, its_users = a.used_by(value), b.used_by(its)
            if not users and not its_users:
                continue
            keys = {(a.loose[use >> 16], use & 0xFFFF): use >> 16 for use in reversed(users)}
            for use in its_users:
                user = keys.get((b.loose[use >> 16], use & 0xFFFF))
                if user is not None and self._continues(user, use >> 16, steps - 1):
                    break
            else:
                return False
        return True

    def _jump(self, i: int, j: int) -> tuple[int, int]:
        """Past a place where nothing is certain: to the next keys that both captures have just once from there on."""
        counts: list[dict[int, list[int]]] = []
        for left, place, side in ((self.left_a, i, self.a), (self.left_b, j, self.b)):
            where: dict[int, list[int]] = defaultdict(list)
            at = left.next(place + 1)
            while at < len(left.ops):
                where[side.key[left.ops[at]]].append(at)
                at = left.next(at + 1)
            counts.append(where)
        for key, places in counts[0].items():
            its = counts[1].get(key, [])
            if len(places) == 1 and len(its) == 1:
                op, other = self.left_a.ops[places[0]], self.left_b.ops[its[0]]
                if self._compatible(op, other, {}) and self._continues(op, other):
                    self._take(op, other)
                    return places[0], its[0]
        return len(self.left_a.ops), len(self.left_b.ops)


def _roots(side: _Side, value: int, most: int) -> set[int] | None:
    """The labels of the shared values that a value comes from through ops without a partner; None: more than `most`."""
    found: set[int] = set()
    seen, waiting = {value}, [value]
    while waiting:
        value = waiting.pop()
        if side.shared(value):
            found.add(side.label[value])
            continue
        op = side.value_op[value]
        if op >= 0:
            new = [each for each in side.leading_to(op, value) if each not in seen]
            seen.update(new)
            waiting += new
        if len(found) > most or len(seen) > 8 * most:
            return None
    return found


def _leaving(a: _Side, b: _Side) -> Iterator[tuple[int, int]]:
    """Values of a and b at the same place with other labels: that paired ops read, or that are in the same memory at
    the end. Memory is the same if it had the same value before."""
    for op, other in enumerate(a.partner):
        if other >= 0:
            for value, its in zip(a.read_by(op), b.read_by(other), strict=False):
                if a.label[value] != b.label[its]:
                    yield value, its
    held: list[dict[int, list[list[int]]]] = []  # the values of each storage, in order, by the label of the first one
    for side in (a, b):
        by_storage: dict[int, list[int]] = defaultdict(list)
        for value, storage in enumerate(side.trace.value_storage.tolist()):
            by_storage[storage].append(value)
        held.append(defaultdict(list))
        for values in by_storage.values():
            held[-1][side.label[values[0]]].append(values)
    for label, storages in held[0].items():
        for values, others in zip(storages, held[1].get(label, ()), strict=False):
            if len(values) > 1 < len(others) and a.label[values[-1]] != b.label[others[-1]]:
                yield values[-1], others[-1]


def _ends(a: _Side, b: _Side, leaving: set[tuple[int, int]]) -> tuple[list[tuple[int, int]], tuple[set[int], set[int]]]:
    """What ops without a partner compute for the program itself, paired: values that the host reads, and those that no
    op makes anything of. They belong together if they are as long, and of equal content, or from the same values; what
    is left, in order, if both captures have as many. Also the values of both that are left and that the host reads or
    that are still there at the end. `leaving` are pairs already."""
    left: tuple[list[int], list[int]] = ([], [])
    for side, values in zip((a, b), left, strict=True):
        trace, partner = side.trace, np.array(side.partner, np.int64)
        mine = (trace.value_op >= 0) & (trace.value_read_by_host | trace.main & ~trace.used)
        mine[mine] = partner[trace.value_op[mine]] < 0
        mine[[pair[side.number] for pair in leaving]] = False
        values += np.flatnonzero(mine).tolist()

    def content(side: _Side, value: int) -> Hashable:
        return int(side.trace.value_content[value]) or None

    def origin(side: _Side, value: int) -> Hashable:
        roots = _roots(side, value, 4 * _MOST_ROOTS)
        return frozenset(roots) if roots else None

    pairs: list[tuple[int, int]] = []
    for alike in (content, origin, lambda side, value: 0):
        groups: list[dict[tuple[int, Hashable], list[int]]] = [defaultdict(list), defaultdict(list)]
        for side, values, group in zip((a, b), left, groups, strict=True):
            for value in values:
                key = alike(side, value)
                if key is not None:
                    group[int(side.trace.value_bytes[value]), key].append(value)
        for common in groups[0].keys() & groups[1].keys():
            one, other = groups[0][common], groups[1][common]
            if alike is content or len(one) == len(other):
                pairs += zip(one, other, strict=False)
        for place, values in enumerate(left):
            paired = {pair[place] for pair in pairs}
            # What one capture computes once more is the counterpart of equal content alone, unless the host reads it.
            side = (a, b)[place]
            values[:] = [
                value
                for value in values
                if value not in paired and (not side.shared(value) or side.trace.value_read_by_host[value])
            ]
    given: tuple[set[int], set[int]] = (set(), set())
    for side, values, found in zip((a, b), left, given, strict=True):
        kept = [v for v in values if not side.shared(v)]
        found.update(v for v in kept if side.trace.value_read_by_host[v] or not side.trace.value_released[v])
    return pairs, given


def _blocks(a: _Side, b: _Side) -> list[Block]:
    """Connect the ops without a partner by data flow, and find where they meet paired ops again."""
    group: dict[tuple[int, int], tuple[int, int]] = {}

    def find(node: tuple[int, int]) -> tuple[int, int]:
        group.setdefault(node, node)
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for side in (a, b):
        shown: dict[tuple[int, int], int] = {}  # of each group: the first paired op that reads what it wrote
        for op in range(len(side.partner)):
            if not side.is_alone(op):
                continue
            mine = find((side.number, op))
            users = (use >> 16 for value in side.written_by(op) for use in side.used_by(value))
            shown[mine] = min((user for user in users if side.partner[user] >= 0), default=len(side.partner))
            for value in side.read_by(op):
                source = side.value_op[value]
                if source < 0 or not side.is_alone(source):
                    continue
                before = find((side.number, source))
                if before != mine and shown[before] > op:  # else it may depend on what the group led to
                    group[before] = mine
                    shown[mine] = min(shown[mine], shown[before])
    if not group:
        return []
    outputs: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    leaving_both = set(_leaving(a, b))
    ends, unmatched = _ends(a, b, leaving_both)
    for value, its in [*leaving_both, *ends]:
        nodes = [
            (side.number, side.value_op[each])
            for side, each in ((a, value), (b, its))
            if side.value_op[each] >= 0 and side.is_alone(side.value_op[each])
        ]
        if nodes:
            for node in nodes[1:]:
                group[find(node)] = find(nodes[0])
            outputs[nodes[0]].add((value, its))
    members: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    leaving: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for node in sorted(group):
        members[find(node)][node[0]].append(node[1])
        leaving[find(node)] |= outputs.get(node, set())
    open_ends = [
        {find((side.number, side.value_op[value])) for value in values}
        for side, values in zip((a, b), unmatched, strict=True)
    ]
    return [
        Block(tuple(one), tuple(two), tuple(sorted(leaving[key])), key in open_ends[0] & open_ends[1])
        for key, (one, two) in members.items()
    ]
