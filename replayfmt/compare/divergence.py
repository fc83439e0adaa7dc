"""Where two aligned captures first differ: ops whose inputs are equal and whose results are not.

Equal is only what is known to be equal, by content: digests of the tensors themselves, or of everything that was
written to their memory. A pair of ops whose inputs differ has inherited its difference; one whose inputs are not known
is neither accused nor cleared. So a wrong alignment can hide a difference, but cannot accuse an op: one function of
equal inputs has two results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from replayfmt.format.record_frames import spans

from .alignment import Alignment, Block
from .distances import Distance
from .trace import UNKNOWN, Trace

EQUAL, DIFFERENT, NOT_KNOWN = 0, 1, 2
_LATE = -1

# The distance of two observations, by their places.
Judge = Callable[[int, int], Distance]


@dataclass(frozen=True)
class Root:
    """Where a difference begins. `a` and `b` are ops, by place; of a `block`, all its ops and those without a partner
    that led to them. `kind`: op (equal inputs, another result), arguments (also other numbers, sizes or dtypes),
    randomness (another state of the generators), block (ops that stand for each other, or are in one capture alone), or
    input (content that came from outside)."""

    kind: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    observed: tuple[int, int] | None = None  # of a and b
    doubtful: bool = False  # behind a place where the alignment is not certain
    value: tuple[int, int] | None = None  # of an input
    block: Block | None = None
    # Of a block: the values of a that are not known to be equal when they leave it, and the observations of them and
    # theirs; -1 for none.
    leaving: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Divergence:
    """`inputs` and `results` are by op of a: EQUAL, DIFFERENT or NOT_KNOWN; NOT_KNOWN, too, for ops without a partner.
    `observed` are the results that differ, as observations of a and b; `compared` counts all that were compared,
    `within` those that differ within the tolerance. `roots` are in order of execution, `unknown` the ops that differ
    and whose inputs are not known, `consequence_of` the root (by place) of ops that inherited a difference."""

    inputs: np.ndarray
    results: np.ndarray
    observed: list[tuple[int, int]]
    compared: int
    within: int
    roots: list[Root] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    consequence_of: dict[int, int] = field(default_factory=dict)
    alone: list[int] = field(default_factory=list)  # blocks of which nothing is known to be equal
    aside: list[int] = field(default_factory=list)  # blocks of one capture alone that nothing else depends on
    inherited: list[Root] = field(default_factory=list)  # blocks that differ and may have read what differs

    @property
    def different(self) -> int:
        return len(self.observed)

    def consequences(self, root: int) -> int:
        return sum(each == root for each in self.consequence_of.values())


def diverge(a: Trace, b: Trace, alignment: Alignment, judge: Judge | None = None) -> Divergence:
    """Find where two captures differ. `judge` decides whether results whose digests differ are equal enough; without
    it, none is."""
    return _Finding(a, b, alignment, judge).run()


def differing(a: Trace, b: Trace, alignment: Alignment) -> tuple[list[tuple[int, int]], int]:
    """The results of paired ops that differ, as observations of a and b, in order; and how many were compared."""
    observed, compared, _within = _Finding(a, b, alignment, None)._compare_results()
    return observed, compared


class _Finding:
    def __init__(self, a: Trace, b: Trace, alignment: Alignment, judge: Judge | None) -> None:
        self.a, self.b, self.alignment, self.judge = a, b, alignment, judge
        self.verdicts: dict[tuple[int, int], bool] = {}
        self.results = np.full(a.ops, NOT_KNOWN, np.int8)

    def run(self) -> Divergence:
        a, alignment = self.a, self.alignment
        observed, compared, within = self._compare_results()
        self.inputs, self.reads = self._compare_inputs()
        found = Divergence(self.inputs, self.results, observed, compared, within)
        by_op: dict[int, tuple[int, int]] = {}
        for one, other in observed:
            by_op.setdefault(int(a.observed_op[one]), (one, other))
        limit_a = min((x for x, _y in alignment.doubts), default=a.ops)
        limit_b = min((y for _x, y in alignment.doubts), default=self.b.ops)
        roots: list[tuple[int, Root]] = []
        random = self._random_differs()
        for op in np.flatnonzero(self.results == DIFFERENT).tolist():
            other = int(alignment.partner_of_a[op])
            if self.inputs[op] == EQUAL:
                kind = "randomness" if random[op] else "op" if alignment.exact[op] else "arguments"
                doubtful = op >= limit_a or other >= limit_b
                roots.append((op, Root(kind, (op,), (other,), by_op[op], doubtful)))
            elif self.inputs[op] == NOT_KNOWN:
                found.unknown.append(op)
        found.unknown += self._changed_and_not_compared()
        roots += self._differing_inputs()
        roots += self._differing_blocks(found)
        found.roots = [root for _op, root in sorted(roots, key=lambda each: (each[1].doubtful, each[0]))]
        trace_consequences(self.a, found)
        return found

    def _matched(self) -> tuple[np.ndarray, np.ndarray]:
        """Observations of paired ops that show the same: their places in a and b."""
        keys = []
        for trace, partner in ((self.a, None), (self.b, self.alignment.partner_of_b)):
            op = trace.observed_op.copy()
            known = op >= 0
            if partner is not None:
                op[known] = partner[op[known]]
            shape = np.where(trace.observed_as == _LATE, trace.observed_shape, np.uint64(0))
            order = np.lexsort((np.arange(len(op)), shape, trace.observed_as, op))
            fields = np.zeros(len(op), [("op", "i8"), ("as", "i8"), ("shape", "u8"), ("nth", "i8")])
            fields["op"], fields["as"], fields["shape"] = op, trace.observed_as, shape
            sorted_ = fields[order]
            new = np.concatenate(([True], sorted_[1:] != sorted_[:-1])) if len(op) else np.zeros(0, bool)
            start = np.maximum.accumulate(np.where(new, np.arange(len(op)), 0))
            fields["nth"][order] = np.arange(len(op)) - start
            fields["op"][fields["op"] < 0] = -1 if partner is None else -2
            keys.append(fields)
        _same, one, other = np.intersect1d(keys[0], keys[1], return_indices=True)
        return one, other

    def _compare_results(self) -> tuple[list[tuple[int, int]], int, int]:
        one, other = self._matched()
        order = np.argsort(one)
        one, other = one[order], other[order]
        differ = self.a.observed_hash[one] != self.b.observed_hash[other]
        within = 0
        if self.judge is not None:
            for place in np.flatnonzero(differ).tolist():
                if self._close(int(one[place]), int(other[place])):
                    differ[place] = False
                    within += 1
        op = self.a.observed_op[one]
        self.results[op] = EQUAL
        self.results[op[differ]] = DIFFERENT
        pairs = list(zip(one[differ].tolist(), other[differ].tolist(), strict=True))
        return pairs, len(one), within

    def _close(self, one: int, other: int) -> bool:
        known = self.verdicts.get((one, other))
        if known is None:
            known = self.judge is not None and self.judge(one, other).beyond == 0
            self.verdicts[one, other] = known
        return known

    def _compare_inputs(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The state of the inputs of each op of a, and of each of its reads where they are not all equal."""
        a, b = self.a, self.b
        state = np.full(a.ops, NOT_KNOWN, np.int8)
        ops = np.flatnonzero(self.alignment.partner_of_a >= 0)
        others = self.alignment.partner_of_a[ops]
        count = a.read_first[ops + 1] - a.read_first[ops]
        alike = count == b.read_first[others + 1] - b.read_first[others]
        ops, others, count = ops[alike], others[alike], count[alike]
        one, other = spans(a.read_first[ops], count), spans(b.read_first[others], count)
        reads = np.full(len(one), NOT_KNOWN, np.int8)
        for x, y in ((a.derived[one], b.derived[other]), (a.direct[one], b.direct[other])):
            both = (x > 0) & (y > 0) & (reads != EQUAL)
            reads[both] = np.where(x[both] == y[both], EQUAL, DIFFERENT)
        seen, its = a.read_observed[one], b.read_observed[other]
        # The same memory with the same content, seen through another view: what differs is how the op is called, unless
        # a paired op made the view and already differs.
        contents = a.value_content[a.read_value[one]], b.value_content[b.read_value[other]]
        for place in np.flatnonzero((reads == DIFFERENT) & (contents[0] == contents[1]) & (contents[0] > 0)).tolist():
            maker = int(a.observed_op[seen[place]]) if seen[place] >= 0 else -1
            if maker < 0 or self.results[maker] != DIFFERENT:
                reads[place] = EQUAL
        if self.judge is not None:
            for place in np.flatnonzero((reads == DIFFERENT) & (seen >= 0) & (its >= 0)).tolist():
                if self._close(int(seen[place]), int(its[place])):
                    reads[place] = EQUAL
        owner = np.repeat(np.arange(len(ops)), count)
        worst = np.zeros(len(ops), np.int8)
        np.maximum.at(worst, owner, reads)
        worst[np.bincount(owner, reads == DIFFERENT, len(ops)) > 0] = DIFFERENT
        unknown = a.draws[ops] & ((a.randomness[ops] == 0) | (b.randomness[others] == 0))
        worst[unknown & (worst == EQUAL)] = NOT_KNOWN
        state[ops] = worst
        starts = np.cumsum(count) - count
        kept = {
            int(ops[i]): reads[starts[i] : starts[i] + count[i]]
            for i in np.flatnonzero((worst != EQUAL) | (count == 0)).tolist()
        }
        return state, kept

    def _changed_and_not_compared(self) -> list[int]:
        """Ops of a that give the program something of which nothing is known, from ops that are called differently."""
        a = self.a
        changed = (self.alignment.partner_of_a >= 0) & ~self.alignment.exact & (self.results == NOT_KNOWN)
        if not changed.any():
            return []
        suspect, found = np.zeros(len(a.value_op), bool), []
        for op in np.flatnonzero(a.writing & (self.results == NOT_KNOWN)).tolist():
            states = self.reads.get(op)  # None: all of them are equal
            reads = a.read_by(op)
            if changed[op] or states is not None and suspect[reads[states != EQUAL]].any():
                written = a.written_by(op)
                suspect[written] = True
                if not a.used[written[a.main[written]]].any():
                    found.append(op)
        return found

    def _random_differs(self) -> np.ndarray:
        partner = self.alignment.partner_of_a
        other = self.b.randomness[np.maximum(partner, 0)] if self.b.ops else np.zeros(len(partner), np.uint64)
        return (partner >= 0) & self.a.draws & (self.a.randomness != other)

    def _differing_inputs(self) -> list[tuple[int, Root]]:
        """Content from outside that is not the same, by the first paired op that reads it."""
        found: dict[int, tuple[int, Root]] = {}
        a, b = self.a, self.b
        for op, states in self.reads.items():
            other = int(self.alignment.partner_of_a[op])
            for place in np.flatnonzero(states == DIFFERENT).tolist():
                value = int(a.read_value[a.read_first[op] + place])
                its = int(b.read_value[b.read_first[other] + place])
                if a.value_op[value] < 0 and b.value_op[its] < 0 and value not in found:
                    contents = a.value_content[value], b.value_content[its]
                    if UNKNOWN not in contents and contents[0] != contents[1]:
                        found[value] = op, Root("input", (op,), (other,), None, value=(value, its))
        return list(found.values())

    def _differing_blocks(self, found: Divergence) -> list[tuple[int, Root]]:
        """Blocks whose inputs are equal, and what leaves them is not. Those of which nothing is known to be equal are
        listed as alone."""
        reads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        a, b, partner = self.a, self.b, self.alignment.partner_of_a
        wanted = {pair for block in self.alignment.blocks for pair in block.outputs}
        if wanted:
            for op in np.flatnonzero(partner >= 0).tolist():
                start, its = int(a.read_first[op]), int(b.read_first[partner[op]])
                for place in range(int(a.read_first[op + 1]) - start):
                    if its + place < len(b.read_value):
                        pair = int(a.read_value[start + place]), int(b.read_value[its + place])
                        if pair in wanted:
                            reads[pair].append((op, place))
        roots, unknown, compared = [], [], []
        for number, block in enumerate(self.alignment.blocks):
            uses = [use for pair in block.outputs for use in reads.get(pair, ())]
            states = {
                pair: [self._read(*use) for use in reads[pair]] if pair in reads else [self._held(*pair)]
                for pair in block.outputs
            }
            known = {state for each in states.values() for state in each}
            found.compared += sum(pair not in reads and states[pair] != [NOT_KNOWN] for pair in block.outputs)
            if not known or (NOT_KNOWN in known or block.unmatched) and DIFFERENT not in known:
                unknown.append(number)
                continue
            compared.append(block)
            if DIFFERENT in known:
                ops, others, equal = self._with_all_that_led_to(block)
                first = ops[0] if ops else min((op for op, _place in uses), default=a.ops - 1)
                doubtful = self._behind_doubt(first, others)
                leaving = tuple(
                    (pair[0], *(self._shown(pair, reads.get(pair, [])) if DIFFERENT in states[pair] else (-1, -1)))
                    for pair in block.outputs
                    if states[pair] != [EQUAL] * len(states[pair])
                )
                root = Root("block", ops, others, None, doubtful, block=block, leaving=leaving)
                if equal:
                    roots.append((first, root))
                else:
                    found.inherited.append(root)
        self._set_alone(found, unknown, compared)
        return roots

    def _set_alone(self, found: Divergence, unknown: list[int], compared: list[Block]) -> None:
        """List the blocks without anything known, by number, as alone or aside."""
        traces = self.a, self.b
        partners = self.alignment.partner_of_a, self.alignment.partner_of_b
        # What only leads to blocks that were compared was compared with them.
        seen = [
            self._with_sources(trace, {op for block in compared for op in (block.a if trace is self.a else block.b)})
            for trace in traces
        ]
        alone: list[dict[int, list[int]]] = [{}, {}]  # of a and of b: the ops of each block that write something
        for number in unknown:
            block = self.alignment.blocks[number]
            for trace, ops, known, mine in zip(traces, (block.a, block.b), seen, alone, strict=True):
                rest = [op for op in ops if op not in known and trace.writing[op]]
                if rest:
                    mine[number] = rest
        # What one capture computes besides, when all that the other one computes was compared.
        for one, other in ((0, 1), (1, 0)):
            its_own = np.flatnonzero(traces[other].writing & (partners[other] < 0))
            if seen[other].issuperset(its_own.tolist()):
                found.aside += self._aside(traces[one], alone[one])
        found.alone = sorted({*alone[0], *alone[1]}.difference(found.aside))

    def _aside(self, trace: Trace, blocks: dict[int, list[int]]) -> list[int]:
        """Those of the blocks, by the ops that write, that only look at what both captures compute, like a log: the
        host reads what they write, and no other op, and all of that memory is gone when the capture ends. What follows
        the last op of both captures may be the rest of a run that the other did not go on with."""
        partners = self.alignment.partner_of_a if trace is self.a else self.alignment.partner_of_b
        paired = np.flatnonzero((partners >= 0) & trace.writing)
        last = int(paired[-1]) if len(paired) else -1
        # Memory that others than the ops without a partner write or read.
        shared = np.zeros(int(trace.value_storage.max(initial=0)) + 1, bool)
        writer = trace.value_op
        shared[trace.value_storage[(writer < 0) | (partners[np.maximum(writer, 0)] >= 0)]] = True
        reader = np.repeat(partners >= 0, np.diff(trace.read_first))
        shared[trace.value_storage[trace.read_value[reader]]] = True
        found = []
        for number, ops in blocks.items():
            values = np.concatenate([trace.written_by(op) for op in ops])
            own = trace.value_released[values].all() and not shared[trace.value_storage[values]].any()
            if own and ops[-1] < last and trace.value_read_by_host[values].any():
                found.append(number)
        return found

    def _shown(self, pair: tuple[int, int], uses: list[tuple[int, int]]) -> tuple[int, int]:
        """Observations of the same of both values: of all of their memory, or as paired ops read them."""
        one, other = int(self.a.value_observed[pair[0]]), int(self.b.value_observed[pair[1]])
        found = [(one, other)]
        for op, place in uses:
            its = int(self.b.read_first[self.alignment.partner_of_a[op]]) + place
            found.append((int(self.a.read_observed[self.a.read_first[op] + place]), int(self.b.read_observed[its])))
        for one, other in found:
            # Of other sizes the elements may be in another order: that tells something only if they are the same.
            if min(one, other) >= 0 and (
                self.a.observed_shape[one] == self.b.observed_shape[other]
                or self.a.observed_hash[one] == self.b.observed_hash[other]
            ):
                return one, other
        return -1, -1

    def _held(self, value: int, its: int) -> int:
        """The state of what leaves a block and no paired op reads."""
        one, other = self._shown((value, its), [])
        if one >= 0:
            same = self.a.observed_hash[one] == self.b.observed_hash[other] or self._close(one, other)
            return EQUAL if same else DIFFERENT
        content = self.a.value_content[value]
        # Other hashes may be of the same bytes, written in another way.
        return EQUAL if content != UNKNOWN and content == self.b.value_content[its] else NOT_KNOWN

    def _read(self, op: int, place: int) -> int:
        kept = self.reads.get(op)
        return EQUAL if kept is None else int(kept[place]) if place < len(kept) else NOT_KNOWN

    def _behind_doubt(self, op: int, others: tuple[int, ...]) -> bool:
        doubts = self.alignment.doubts
        return any(op >= x for x, _y in doubts) or any(other >= y for other in others[:1] for _x, y in doubts)

    def _with_all_that_led_to(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """The ops of a block and those without a partner that led to it, of a and b; and whether all that these read is
        in both captures and equal. What only one of them has is part of the difference."""
        found: list[tuple[int, ...]] = []
        equal = True
        for trace, members, partners in (
            (self.a, block.a, self.alignment.partner_of_a),
            (self.b, block.b, self.alignment.partner_of_b),
        ):
            inside = self._with_sources(trace, set(members))
            for op in inside:
                for value in trace.read_by(op).tolist():
                    source = int(trace.value_op[value])
                    if source < 0:
                        equal = equal and bool(trace.value_content[value])
                    elif source not in inside:
                        equal = equal and self.results[source if trace is self.a else partners[source]] == EQUAL
            found.append(tuple(sorted(inside)))
        return found[0], found[1], equal

    def _with_sources(self, trace: Trace, ops: set[int]) -> set[int]:
        """These ops, and those without a partner that led to them."""
        partners = self.alignment.partner_of_a if trace is self.a else self.alignment.partner_of_b
        found, waiting = set(ops), list(ops)
        while waiting:
            op = waiting.pop()
            sources = trace.value_op[trace.read_by(op)]
            new = {source for source in sources.tolist() if source >= 0 and partners[source] < 0} - found
            found |= new
            waiting += new
        return found


def trace_consequences(a: Trace, found: Divergence) -> dict[int, int]:
    """Follow each root along the data flow of a: the first one that each value may have inherited a difference from."""
    found.consequence_of.clear()
    if not found.roots:
        return {}
    origin: dict[int, int] = {}  # by value
    begins: dict[int, int] = {}
    led: dict[int, int] = {}  # by op: also of views, which write no value
    for number, root in enumerate(found.roots):
        if root.kind == "input":
            assert root.value is not None
            origin.setdefault(root.value[0], number)
        else:
            for op in root.a:
                begins.setdefault(op, number)
        if root.block is not None:
            for value, _its in root.block.outputs:
                origin.setdefault(value, number)
    reads, first = a.read_value.tolist(), a.read_first.tolist()
    writes, write_first = a.writes.tolist(), a.write_first.tolist()
    differs = (found.results == DIFFERENT).tolist()
    equal = (found.results == EQUAL).tolist()
    makers = np.where(a.read_observed >= 0, a.observed_op[a.read_observed], -1).tolist() if len(a.observed_op) else []
    for op in range(a.ops):
        number = begins.get(op, -1)
        if number < 0:
            read = range(first[op], first[op + 1])
            origins = [origin[reads[each]] for each in read if reads[each] in origin]
            origins += [led[makers[each]] for each in read if makers and makers[each] in led]
            number = min(origins, default=-1)
            if number >= 0 and differs[op]:
                found.consequence_of[op] = number
        if number >= 0 and not equal[op]:
            led[op] = number
            for value in writes[write_first[op] : write_first[op + 1]]:
                origin.setdefault(value, number)
    return origin
