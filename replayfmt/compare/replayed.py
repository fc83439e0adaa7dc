"""Results of captures that hold none, made by replays here. The files stay as they are.

A first replay of each capture hashes every result while it exists. Only of those that differ a second one takes the
digests, with the elements they sample, so memory does not grow with the content. A replay is verified by what the
capture does hold (digests of live tensors, host reads); one that differs from its capture is an error, since its
results are not the captured ones.

Tolerances of their own for ops whose results differ (`auto`) come from a replay of capture a: such an op runs again on
its inputs, in float64 and perturbed by one unit in the last place, or by as much as the inputs differ between the
captures (`replayfmt.pytorch.rounding`). It is to blame if its results are off by more than `MARGIN` times all that. The
ops of a block run so one after the other, each on what those before it made (`chained`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from replayfmt.errors import ReplayMismatch
from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import TensorDigest
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted
from replayfmt.pytorch.overloads import find_overload
from replayfmt.pytorch.rounding import MARGIN, largest, rounding_runs, spread_of, wide
from replayfmt.pytorch.tensors.digests import digest_tensor, hash_tensor
from replayfmt.pytorch.tensors.memory import byte_tensor, tensors_in, undispatched
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.content import Clones
from replayfmt.replay.run.steps import IsolatedOp

from .chained import Chain
from .distances import FLOATS, Tolerance
from .divergence import EQUAL, NOT_KNOWN, Root, trace_consequences
from .results import Comparison, digest_of, dtype_of, observed_distance
from .trace import SCALAR, Hashed, Side, Trace, read_trace, written_slots

Progress = Callable[[str, int, int], None]
# Gets each result and everything an op wrote: the ordinal, its place among these, its row in the frame, and itself.
See = Callable[[int, int, int, torch.Tensor], Any]
_MOST_DIGESTS = 100_000  # about 100 MB


def replayed_sides(sides: list[Side], options: Mapping[str, Any], on_progress: Progress) -> list[Side]:
    """Both captures with hashes of results from replays. Raises what a replay raises, and ReplayMismatch."""
    made = []
    for side in sides:
        rows = _seen(side.reader, partial(_hashed, side.reader), options, on_progress)
        columns = np.array([row[:5] for row in rows], np.int64).reshape(-1, 5).T
        hashes = np.array([row[5:] for row in rows], np.uint64).reshape(-1, 2).T
        made.append(Side(side.reader, read_trace(side.reader, results=Hashed(*columns, *hashes)), {}))
    return made


def _hashed(reader: CaptureReader, ordinal: int, _place: int, row: int, tensor: torch.Tensor) -> tuple[int, ...]:
    """The fields of `Hashed`."""
    frame = reader.frame(reader.frame_of(ordinal))
    columns = frame.tensor_id, frame.tensor_storage, frame.tensor_meta, frame.tensor_offset
    try:
        low, high = hash_tensor(tensor)
    except TypeError:  # packed dtypes have no digest
        low = high = 0
    return ordinal, *(int(column[row]) for column in columns), low, high


def with_digests(
    sides: list[Side], observed: list[tuple[int, int]], options: Mapping[str, Any], on_progress: Progress
) -> list[Side]:
    """Both captures with the digests of these observations, by another replay."""
    made = []
    for which, side in enumerate(sides):
        trace = side.trace
        places = sorted({pair[which] for pair in observed[:_MOST_DIGESTS]})
        places = [place for place in places if trace.observed_as[place] < SCALAR]
        wanted = {(int(trace.observed_at[place]), int(trace.observed_as[place])): place for place in places}
        digests = _seen(side.reader, partial(_digest, wanted), options, on_progress) if wanted else []
        made.append(Side(side.reader, trace, dict(digests)))
    return made


def _digest(
    wanted: Mapping[tuple[int, int], int], ordinal: int, place: int, _row: int, tensor: torch.Tensor
) -> tuple[int, TensorDigest] | None:
    key = wanted.get((ordinal, place))
    return None if key is None else (key, digest_tensor(tensor))


def _seen(reader: CaptureReader, see: See, options: Mapping[str, Any], on_progress: Progress) -> list[Any]:
    """What `see` returns, but for None, in a verified replay of a whole capture. Raises ReplayMismatch if that
    differs."""
    with Plan(reader, **options) as plan:
        while True:
            watcher = _Watching(reader, see)
            _verification, divergence = plan.watch(
                watcher,
                reader.record_count,
                "auto",
                on_progress=lambda done: on_progress(f"replaying {reader.path}", done, reader.record_count),
            )
            if divergence is None:
                return watcher.seen
            if not plan.explain(divergence.seen_at + 1, "auto"):
                raise ReplayMismatch(
                    f"{reader.path}: its replay here differs from the capture, so results of a replay are not the "
                    f"captured ones: {divergence}; capture with --digests=ops and compare without --replay instead"
                )


class _Watching:
    """A Watcher of everything in one replay."""

    def __init__(self, reader: CaptureReader, see: See) -> None:
        self._reader, self._see, self._written = reader, see, written_slots(reader)
        self._unwritten: set[int] = set()  # storages that were allocated and not written yet
        self.seen: list[Any] = []

    def watches(self, _ordinal: int) -> bool:
        return True

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        pass

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        with undispatched():
            for place, (row, tensor) in enumerate(self._shown(ordinal, results, args)):
                found = self._see(ordinal, place, row, tensor)
                if found is not None:
                    self.seen.append(found)

    def _shown(
        self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors, by their row in the frame; not memory that nothing has written. That is filled with zeros: it
        may hold anything, but what comes of it must be the same each time."""
        reader = self._reader
        frame = reader.frame(reader.frame_of(ordinal))
        at = ordinal - frame.first_ordinal
        rows = frame.slots_of(at)
        storages = frame.tensor_storage[rows].tolist()
        first = reader.layouts[int(frame.signature[at])].arg_tensors
        taken, returned = set(storages[:first]), {storages[slot] for slot in results}
        written = [int(slot) for slot in self._written(int(frame.signature[at])) if slot in args]
        self._unwritten.difference_update(storages[slot] for slot in written)
        for slot, tensor in [*sorted(results.items()), *((slot, args[slot]) for slot in written)]:
            number = storages[slot]
            if (
                tensor.layout is not torch.strided
                or tensor.device.type == "meta"
                or (slot < first and number in returned)
            ):
                continue
            new = slot >= first and number and number not in taken and number not in self._unwritten
            if new and reader.storage(number).origin is StorageOrigin.uninitialized:
                self._unwritten.add(number)
                if tensor.untyped_storage().nbytes():
                    byte_tensor(tensor.untyped_storage()).zero_()
            if number in self._unwritten:
                continue
            yield int(rows[slot]), tensor


_EXACT = Tolerance("exact")


def explain(made: Comparison, options: Mapping[str, Any], on_progress: Progress) -> None:
    """Clear the differences that rounding and the inputs' own differences explain. The others are roots, or follow from
    roots; what does neither stays different, and unknown."""
    found, alignment = made.divergence, made.alignment
    spreads, errors = _spreads(made, options, on_progress)
    blamed: dict[int, tuple[int, int]] = {}
    unknown = [op for op in found.unknown if found.results[op] == NOT_KNOWN]
    kept: list[tuple[int, int]] = []
    for one, other in found.observed:
        op = int(made.a.trace.observed_op[one])
        verdict = _is_explained(made, one, other, spreads.get(op))
        if verdict is not True and _is_read_alike(made, one, other):
            verdict = True
        if verdict is not True:  # an op is accused by what is known of its inputs alone
            verdict = {EQUAL: False, NOT_KNOWN: None}.get(int(found.inputs[op]), verdict)
        if verdict is not True:
            kept.append((one, other))
        if verdict is None:
            unknown.append(op)
        elif not verdict:
            blamed.setdefault(op, (one, other))
    found.within = found.different - len(kept)
    found.observed = kept
    limit = min((x for x, _y in alignment.doubts), default=made.a.trace.ops)
    roots = [
        Root("op" if alignment.exact[op] else "arguments", (op,), (int(alignment.partner_of_a[op]),), pair, op >= limit)
        for op, pair in blamed.items()
    ]
    _explain_blocks(made, roots, errors)
    found.unknown = sorted({op for op in unknown if op not in found.consequence_of})


def _explain_blocks(made: Comparison, roots: list[Root], errors: Mapping[int, float]) -> None:
    """Make blocks that are off by more than their ops explain roots, beside `roots`, which single ops are."""
    found, trace = made.divergence, made.a.trace
    begun, inherited = (
        [(root, _block_is_explained(made, root, errors)) for root in blocks]
        for blocks in ([root for root in found.roots if root.kind == "block"], found.inherited)
    )
    within = sum(verdict is True for _root, verdict in (*begun, *inherited))
    if within:
        made.notes.append(
            f"what leaves {counted(within, 'group')} of ops that stand for each other differs by no more than the "
            f"rounding of these ops explains"
        )
    roots = [*roots, *(root for root in found.roots if root.kind in ("input", "randomness"))]
    # A block that is off may have inherited that from an earlier root.
    found.roots = roots + [root for root, verdict in (*begun, *inherited) if verdict is False]
    reached = trace_consequences(trace, found)
    found.inherited = [root for root, verdict in inherited if not verdict]
    judged = [*begun, *(each for each in inherited if not _reads_any(trace, each[0].a, reached))]
    roots += [root for root, verdict in judged if verdict is False]
    found.roots = sorted(roots, key=lambda root: (root.doubtful, root.a or root.b))
    found.alone += [
        made.alignment.blocks.index(root.block) for root, verdict in judged if verdict is None and root.block
    ]
    trace_consequences(trace, found)


def _reads_any(trace: Trace, ops: tuple[int, ...], values: Container[int]) -> bool:
    """Whether ops read any of these values, of those that they do not write themselves."""
    inside = set(ops)
    return any(
        value in values and int(trace.value_op[value]) not in inside
        for op in ops
        for value in trace.read_by(op).tolist()
    )


def _is_explained(made: Comparison, one: int, other: int, spread: dict[int, float] | None) -> bool | None:
    """Whether a difference is within what its op explains; None where nothing is known of that."""
    far = observed_distance(made.a, made.b, one, other, _EXACT)
    if far.nan and far.nan[0] != far.nan[1] or far.inf and far.inf[0] != far.inf[1]:
        return False
    place = int(made.a.trace.observed_as[one])
    allowed = None if not spread else max(spread.values()) if place < 0 else spread.get(place)
    if allowed is None:
        return None
    rounded = dtype_of(made.a, one) in FLOATS
    if far.absolute is None:  # no sampled element differs
        return True if rounded else None
    if far.absolute <= (MARGIN if rounded else 1) * allowed:
        return True
    return False if rounded else None


def _is_read_alike(made: Comparison, one: int, other: int) -> bool:
    """Whether these are numbers that the host reads from one tensor, and no farther apart than that."""
    a, b = made.a.trace, made.b.trace
    op, its = int(a.observed_op[one]), int(b.observed_op[other])
    if int(a.observed_as[one]) != SCALAR or a.read_first[op + 1] - a.read_first[op] != 1:
        return False
    shown = int(a.read_observed[a.read_first[op]]), int(b.read_observed[b.read_first[its]])
    if min(shown) < 0 or a.writing[op]:
        return False
    far = observed_distance(made.a, made.b, one, other, _EXACT).absolute
    tensors = observed_distance(made.a, made.b, *shown, _EXACT).absolute
    return far is not None and tensors is not None and far <= tensors


def _block_is_explained(made: Comparison, root: Root, errors: Mapping[int, float]) -> bool | None:
    """Whether what leaves a block is off by no more than its ops in a explain; None where nothing is known of that. A
    block that only reads what is equal is off by more, if all that leaves it is known."""
    verdicts = []
    otherwise = None if root in made.divergence.inherited else False
    for value, one, other in root.leaving:
        allowed = errors[value] if value in errors else _passed_on(made, value)
        spread = None if allowed is None else {int(made.a.trace.observed_as[one]): allowed}
        verdict = None if one < 0 else _is_explained(made, one, other, spread)
        verdicts.append(otherwise if verdict is None and one >= 0 else verdict)
    return False if False in verdicts else None if None in verdicts else True


def _spreads(
    made: Comparison, options: Mapping[str, Any], on_progress: Progress
) -> tuple[dict[int, dict[int, float]], dict[int, float]]:
    """For each op with differing results: how far it explains each of them to be off, by place. For the ops of blocks:
    how far each value that they write may be off, by all that led to it in the block."""
    a = made.a
    ops = {int(a.trace.observed_op[one]) for one, _other in made.divergence.observed} - {-1}
    blocks = [*(root for root in made.divergence.roots if root.kind == "block"), *made.divergence.inherited]
    inside = {op for root in blocks for op in root.a}
    if not ops | inside:
        return {}, {}
    ordinals = {a.ordinal(op): op for op in ops | inside}
    found: dict[int, dict[int, float]] = {}
    chain = Chain(a.trace, inside)
    done = 0

    def on_op(isolated: IsolatedOp) -> None:
        nonlocal done
        op = ordinals.get(isolated.ordinal)
        if op is None:
            return
        done += 1
        on_progress("deriving tolerances", done, len(ordinals))
        kernel = a.reader.kernels[a.record(op).signature.kernel]
        overload = find_overload(kernel.name, kernel.overload)
        if overload is None or a.trace.draws[op]:
            return
        try:
            call = isolated.called()
        except Exception:
            return
        finally:
            isolated.restore()
        errors = _input_errors(made, op)
        if op in inside:
            chain.run(op, overload, call.arguments, call.named, errors)
        else:
            found[op] = _spread(overload, call.arguments, call.named, errors)

    with Plan(a.reader, keep_going=True, **options) as plan:
        plan.examine(on_op, plan.preparation.slice(list(ordinals)))
    return found, chain.errors


def _input_errors(made: Comparison, op: int) -> list[float]:
    """How far each tensor argument is off between the captures, relative to its size; NaN where that is not known."""
    a, b = made.a, made.b
    other = int(made.alignment.partner_of_a[op])
    reads = range(int(a.trace.read_first[op]), int(a.trace.read_first[op + 1]))
    if other < 0:
        return [_value_error(made, int(a.trace.read_value[read])) for read in reads]
    errors = []
    for place, read in enumerate(reads):
        its = int(b.trace.read_first[other]) + place
        if its >= int(b.trace.read_first[other + 1]):
            errors.append(float("nan"))
            continue
        same = any(
            x and x == y
            for x, y in ((a.trace.direct[read], b.trace.direct[its]), (a.trace.derived[read], b.trace.derived[its]))
        )
        seen = int(a.trace.read_observed[read]), int(b.trace.read_observed[its])
        errors.append(0.0 if same else _relative(made, *seen) if min(seen) >= 0 else float("nan"))
    return errors


def _shown_by_both(made: Comparison, value: int) -> tuple[int, int] | None:
    """The observations of what a paired op of a wrote and of what its partner wrote."""
    a, b = made.a.trace, made.b.trace
    op = int(a.value_op[value])
    other = int(made.alignment.partner_of_a[op]) if op >= 0 else -1
    if other < 0:
        return None
    place = int(np.flatnonzero(a.written_by(op) == value)[0])
    theirs = b.written_by(other)
    shown = int(a.value_observed[value]), int(b.value_observed[theirs[place]]) if place < len(theirs) else -1
    return shown if min(shown) >= 0 else None


def _value_error(made: Comparison, value: int) -> float:
    """How far a value is off, relative to its size; NaN where that is not known."""
    shown = _shown_by_both(made, value)
    if shown is None:
        return float("nan")
    same = made.a.trace.observed_hash[shown[0]] == made.b.trace.observed_hash[shown[1]]
    return 0.0 if same else _relative(made, *shown)


def _passed_on(made: Comparison, value: int) -> float | None:
    """How far a value that a block of a leaves as it is may be off: as far as it was, or by a rounding of its largest
    element."""
    shown = _shown_by_both(made, value)
    digest = None if shown is None else digest_of(made.a, shown[0])
    if shown is None or digest is None or dtype_of(made.a, shown[0]) not in FLOATS:
        return None
    far = observed_distance(made.a, made.b, *shown, _EXACT).absolute or 0.0
    sample = np.abs(np.array(digest.sample, np.complex128))
    eps = 2.0 ** -FLOATS[dtype_of(made.a, shown[0])][0]
    return max(far, eps * float(sample[np.isfinite(sample)].max(initial=0.0)))


def _relative(made: Comparison, one: int, other: int) -> float:
    digests = digest_of(made.a, one), digest_of(made.b, other)
    if digests[0] is None or digests[1] is None or len(digests[0].sample) != len(digests[1].sample):
        return float("nan")
    x, y = np.array(digests[0].sample, np.complex128), np.array(digests[1].sample, np.complex128)
    keep = np.isfinite(x) & np.isfinite(y)
    size = float(np.linalg.norm(x[keep]))
    return float(np.linalg.norm(x[keep] - y[keep])) / size if size else float("nan")


def _spread(
    overload: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any], errors: list[float]
) -> dict[int, float]:
    """The largest distance, by place among the results, that rounding and these errors of the inputs explain."""

    def outputs(taken: tuple[Any, ...], by_name: dict[str, Any]) -> list[torch.Tensor] | None:
        return _outputs(overload, taken, by_name)

    with undispatched():
        before, runs = outputs(arguments, named), rounding_runs(outputs, arguments, named, errors)
        found = _moved(before, runs) | spread_of(before, runs)
    gives_tensors = any("Tensor" in str(each.type) for each in overload._schema.returns)
    return found if gives_tensors or 0 not in found else {SCALAR: found[0]}


def _moved(before: list[torch.Tensor] | None, runs: Sequence[list[torch.Tensor] | None]) -> dict[int, float]:
    """The largest step of each result that is not of floating-point numbers, by place: an index, a mask."""
    found = {}
    for place, result in enumerate(before or ()):
        if result.is_floating_point() or result.is_complex():
            continue
        others = [run[place] for run in runs if run is not None and place < len(run)]
        found[place] = max(
            (largest(wide(result) - wide(each)) for each in others if each.shape == result.shape), default=0.0
        )
    return {place: far for place, far in found.items() if far}


def _outputs(overload: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor] | None:
    """What an op returns, and then what it wrote without returning it, on copies; None if it fails."""
    clones = Clones()
    taken, by_name = clones.of(list(arguments)), clones.of(named)
    try:
        returned = overload(*taken, **by_name)
    except Exception:
        return None
    if isinstance(returned, bool | int | float | complex):
        return [torch.tensor(returned, dtype=torch.float64 if isinstance(returned, float) else None)]
    found = tensors_in(returned)
    kept = {tensor.untyped_storage()._cdata for tensor in found}
    for place, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = taken[place] if place < len(taken) else by_name.get(argument.name)
            found += [each for each in tensors_in(value) if each.untyped_storage()._cdata not in kept]
    return found
