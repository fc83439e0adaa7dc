"""A capture as columns for a comparison: what each op is, which values it reads and writes, and what is known of them.

A value is what one write left in one storage: by an op, or by an import from outside (`op` -1). Views are no values of
their own, so that an op reads the value behind the view. `content` of a read identifies its bytes: 0 where the capture
does not say, equal numbers for equal content. It comes from a digest of the tensor itself (`direct`), or from digests
of everything that was written to its storage and how the tensor views it (`derived`); each is comparable with its own
kind alone. Everything is read one frame at a time into numpy arrays. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from replayfmt.format.codes import ITEM_BYTES, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import Node, Record, Signature, TensorDigest
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.record_frames import spans
from replayfmt.format.signature_layout import own_slots
from replayfmt.format.signature_text import signature_of
from replayfmt.pytorch.operators import operator_named

U = np.uint64
# Constants that differ between machines without a difference in what is computed.
_NOT_IN_KEYS = (ValueKind.device, ValueKind.process_group, ValueKind.generator)
_PLAIN, _RESULT = 1, 2  # of an int slot: a plain number among the arguments, among the results; 0: an id
_DRAWS = re.compile(r"(^|_)(rand|randn|randint|randperm|bernoulli|dropout|rrelu|multinomial|normal|uniform|poisson)")
# Operators that work on lists of tensors element by element; others (cat, meshgrid) mix them.
_BY_ELEMENT = re.compile(r"aten::_(foreach|fused)_")
_ORIGINS = {
    ValueKind.payload: StorageOrigin.payload,
    ValueKind.range: StorageOrigin.external_file,
    ValueKind.recipe: StorageOrigin.initializer,
}
UNKNOWN, UNINITIALIZED = 0, 1  # content; other numbers are hashes
SCALAR = 1 << 30  # in place of the place among the results: all numbers among them


@dataclass
class Trace:
    """One capture. `ordinal`, `key`, `loose`, `form`, `draws` and `randomness` are by op, in capture order.

    `key` stands for the kernel, all plain arguments and the metadata of tensors, `loose` for the kernel alone
    (of views, which write nothing, with the ranks of tensors), `form` for the dtypes and sizes of tensors alone.
    `randomness` is the state of the generators as far as known: a hash of what set it and of what was drawn since.
    Reads of op i are `read_first[i]` to `read_first[i + 1]`, by tensor slot; values are numbered by time, and those an
    op writes are `write_first[i]` to `write_first[i + 1]` in `writes`. Observations are digests: those of an op's
    results (`observed_as` is the place among them), and what was seen of its results later (-1).
    """

    path: str
    ordinal: np.ndarray
    key: np.ndarray
    loose: np.ndarray
    form: np.ndarray
    draws: np.ndarray
    randomness: np.ndarray
    read_first: np.ndarray
    read_value: np.ndarray
    read_observed: np.ndarray  # the observation that `direct` is from, -1 for none
    direct: np.ndarray
    derived: np.ndarray
    write_first: np.ndarray
    writes: np.ndarray
    value_op: np.ndarray
    value_content: np.ndarray
    value_bytes: np.ndarray
    value_storage: np.ndarray
    value_observed: np.ndarray  # the first observation of all of its memory, -1 for none
    value_released: np.ndarray  # whether its memory was gone when the capture ended
    value_read_by_host: np.ndarray  # whether the program read it, in part at least: through an op or outside of one
    observed_op: np.ndarray
    observed_as: np.ndarray
    observed_hash: np.ndarray
    observed_shape: np.ndarray
    observed_at: np.ndarray  # ordinal of the record with the digest; of a scalar, the op's own
    # By op, of ops that work on lists element by element: the element of each read, -1 if it is for all.
    elements: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ops(self) -> int:
        return len(self.ordinal)

    @cached_property
    def writing(self) -> np.ndarray:
        """Whether each op writes anything: views do not."""
        return np.diff(self.write_first) > 0

    @cached_property
    def used(self) -> np.ndarray:
        """Whether each value is read by an op that writes anything."""
        found = np.zeros(len(self.value_op), bool)
        found[self.read_value[np.repeat(self.writing, np.diff(self.read_first))]] = True
        return found

    @cached_property
    def main(self) -> np.ndarray:
        """Whether each value is the longest that its op writes, or one of these: a norm also returns its means, a fused
        kernel what the backward pass needs, and those are shorter."""
        op = np.repeat(np.arange(self.ops), np.diff(self.write_first))
        longest = np.zeros(self.ops, np.int64)
        np.maximum.at(longest, op, self.value_bytes[self.writes])
        found = np.zeros(len(self.value_op), bool)
        found[self.writes] = self.value_bytes[self.writes] == longest[op]
        return found

    def read_by(self, op: int) -> np.ndarray:
        """The values that an op reads, by tensor slot."""
        return self.read_value[self.read_first[op] : self.read_first[op + 1]]

    def written_by(self, op: int) -> np.ndarray:
        return self.writes[self.write_first[op] : self.write_first[op + 1]]

    def op_at(self, ordinal: int) -> int:
        """The op with that ordinal, -1 if none has."""
        place = int(np.searchsorted(self.ordinal, ordinal))
        return place if place < self.ops and self.ordinal[place] == ordinal else -1


def mix(values: np.ndarray, salt: np.ndarray | int = 0) -> np.ndarray:
    """A hash of each number, with a salt: splitmix64's finalizer."""
    with np.errstate(over="ignore"):
        h = values.astype(U) + np.asarray(salt).astype(U) * U(0x9E3779B97F4A7C15) + U(0x9E3779B97F4A7C15)
        h = (h ^ (h >> U(30))) * U(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> U(27))) * U(0x94D049BB133111EB)
        return h ^ (h >> U(31))


def text_hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode(errors="backslashreplace"))


def digest_content(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """64 bits of a 128-bit digest, never UNKNOWN or UNINITIALIZED."""
    return np.maximum(mix(low, 7) ^ mix(high, 11), U(2))


class _Signatures:
    """What is the same in all ops of a signature, worked out when it is first met."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        count = len(reader.signatures) + 1
        self.kind = np.concatenate(([0], reader.definitions.column("signature_kind")))
        self.known = np.zeros(count, bool)
        self.key = np.zeros(count, U)
        self.loose = np.zeros(count, U)
        self.draws = np.zeros(count, bool)
        self.arg_tensors = np.zeros(count, np.int64)
        self.int_kinds: dict[int, np.ndarray] = {}
        self.arg_floats = np.zeros(count, np.int64)
        self.written: dict[int, np.ndarray] = {}
        self.elements: dict[int, list[int]] = {}
        self._kernels: dict[int, tuple[int, bool, frozenset[str] | None]] = {}

    def need(self, used: np.ndarray) -> None:
        for number in used[~self.known[used]].tolist():
            self.known[number] = True
            self._add(number, self._reader.signatures[number])

    def _add(self, number: int, signature: Signature) -> None:
        layout = self._reader.layouts[number]
        self.loose[number], self.draws[number], written = self._kernel(signature.kernel)
        self.key[number] = text_hash(f"{self.loose[number]}{signature.status}{_form(signature.args)}")
        self.arg_tensors[number] = layout.arg_tensors
        ints: list[int] = []
        for nodes, plain in ((signature.args, _PLAIN), (signature.results, _RESULT)):
            for node in (each for top in nodes for each in top.preorder()):
                _tensors, count, floats = own_slots(node)
                ints += [plain if node.kind is ValueKind.int else 0] * count
                self.arg_floats[number] += floats if plain is _PLAIN else 0
        self.int_kinds[number] = np.array(ints, np.uint8)
        if _BY_ELEMENT.match(self._reader.kernels[signature.kernel].name if signature.kernel else ""):
            self.elements[number] = elements = [-1] * layout.arg_tensors
            for each in layout.args:
                if each.node.kind is ValueKind.list:
                    for element, slot in enumerate(each.tensors):
                        elements[slot] = element
        slots = [s for each in layout.args if written is None or each.node.name in written for s in each.tensors]
        self.written[number] = np.array(slots, np.int64)

    def _kernel(self, number: int) -> tuple[int, bool, frozenset[str] | None]:
        """A kernel's hash, whether it draws random numbers, and the arguments it writes: None for all of them."""
        if not number:
            return 0, False, frozenset()
        known = self._kernels.get(number)
        if known is None:
            kernel = self._reader.kernels[number]
            written: frozenset[str] | None = None
            try:
                schema = parse_operator_schema(kernel.schema)
                written = frozenset(each.name for each in schema.arguments if each.type.written)
                written |= set(operator_named(kernel.name, kernel.overload).quiet_writes)
            except ValueError:
                pass
            base = kernel.name.rpartition("::")[2]
            draws = "Generator" in kernel.schema or _DRAWS.search(base) is not None
            known = self._kernels[number] = text_hash(kernel.qualified_name), draws, written
        return known


def _form(nodes: tuple[Node, ...]) -> str:
    """The structure and constants of arguments, as text."""
    return "".join(
        f"{node.kind:d}{node.name!r}{'' if node.kind in _NOT_IN_KEYS else node.constant!r}({_form(node.children)})"
        for node in nodes
    )


def _sums(values: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The sum of each run of values, modulo 2^64."""
    running = np.concatenate((np.zeros(1, U), np.cumsum(values, dtype=U)))
    ends = np.concatenate(([0], np.cumsum(count)))
    return running[ends[1:]] - running[ends[:-1]]


@dataclass
class _Columns:
    """Lists of arrays, one of each frame."""

    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.parts.setdefault(name, []).append(array)

    def take(self, name: str, dtype: Any) -> np.ndarray:
        parts = self.parts.pop(name, [])
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


@dataclass(frozen=True)
class Hashed:
    """Digests: the ordinal of the op whose result it is (-1: none), tensor id, storage, meta id and offset, and the
    halves of the hash."""

    ordinal: np.ndarray
    tensor: np.ndarray
    storage: np.ndarray
    meta: np.ndarray
    offset: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_trace(
    reader: CaptureReader, on_progress: Callable[[int], None] = lambda count: None, results: Hashed | None = None
) -> Trace:
    """Read all records of a capture; `results` are used in place of its digests. Raises InvalidCapture for a damaged
    one."""
    return _Reading(reader, results).run(on_progress)


def written_slots(reader: CaptureReader) -> Callable[[int], np.ndarray]:
    """Which argument slots the ops of a signature write, by their schema."""
    about = _Signatures(reader)

    def of(signature: int) -> np.ndarray:
        about.need(np.array([signature]))
        return about.written[signature]

    return of


class _Reading:
    def __init__(self, reader: CaptureReader, results: Hashed | None) -> None:
        self.results = results
        self.reader, self.signatures, self.columns = reader, _Signatures(reader), _Columns()
        metas = range(1, reader.definitions.counts["meta"] + 1)
        self.metas = np.array([0, *(self._meta(number) for number in metas)], U)
        self.shapes = np.array([0, *(self._meta(number, strides=False) for number in metas)], U)
        self.ranks = np.array([0, *(len(reader.metas[number].sizes) for number in metas)], U)
        sizes = (min(prod(m.sizes) * ITEM_BYTES[m.dtype], 1 << 60) for m in (reader.metas[number] for number in metas))
        self.meta_bytes = np.array([0, *sizes], np.int64)
        self.content_kinds: dict[int, ValueKind] = {}  # by signature
        self.ops = 0
        self.elements: dict[int, list[int]] = {}
        self.born: dict[int, int] = {}

    def _meta(self, number: int, strides: bool = True) -> int:
        meta = self.reader.metas[number]
        form = meta.sizes, meta.strides if strides else 0
        return text_hash(f"{meta.dtype:d} {meta.layout:d} {form}")

    def run(self, on_progress: Callable[[int], None]) -> Trace:
        reader, take = self.reader, self.columns.take
        generators: list[tuple[int, int]] = []
        for index, info in enumerate(reader.record_frames):
            self._frame(reader.frame(index), generators)
            on_progress(info.count)
        if self.results is not None:
            self._observe(self.results, self.results.ordinal)
        ordinal = take("ordinal", np.int64)
        read_count, write_count = take("read_count", np.int64), take("write_count", np.int64)
        read_first = np.concatenate(([0], np.cumsum(read_count)))
        read_storage, read_id = take("read_storage", np.int64), take("read_id", np.int64)
        read_time = 2 * np.repeat(ordinal, read_count)
        geometry = take("read_geometry", U)
        trace_values, order = self._values(read_storage, read_time, write_count)
        at = _last(trace_values["storage"], trace_values["time"], read_storage, read_time)
        unseen = take("unseen", np.int64)
        observed = self._observed(ordinal, trace_values)
        content = _contents(trace_values, observed)
        seen = _direct(observed, read_id, read_time, trace_values["time"][at])
        if len(unseen):
            lost = np.searchsorted(2 * unseen, read_time) > np.searchsorted(2 * unseen, trace_values["time"][at])
            seen[lost] = -1
        direct = np.where(seen >= 0, observed["hash"][seen], U(0)) if len(observed["hash"]) else np.zeros(len(at), U)
        derived = np.where(content[at] > 0, mix(content[at], 3) ^ geometry, U(0))
        if len(unseen):
            derived[lost] = 0
        read_by_host = np.zeros(len(content), bool)
        host = _last(
            trace_values["storage"], trace_values["time"], take("host_storage", np.int64), take("host_time", np.int64)
        )
        read_by_host[host[host >= 0]] = True
        gave_numbers = np.zeros(len(ordinal), bool)
        gave_numbers[observed["op"][observed["as"] == SCALAR]] = True
        read_by_host[at[np.repeat(gave_numbers & (write_count == 0), read_count)]] = True
        draws = take("draws", bool)
        key = take("key", U)
        writes = np.argsort(order)[: int(write_count.sum())] if len(order) else np.zeros(0, np.int64)
        return Trace(
            reader.path,
            ordinal,
            key,
            take("loose", U),
            take("form", U),
            draws,
            _randomness(ordinal, key, draws, generators),
            read_first,
            at.astype(np.int64),
            seen,
            direct,
            derived,
            np.concatenate(([0], np.cumsum(write_count))),
            writes,
            trace_values["op"],
            content,
            trace_values["bytes"],
            trace_values["storage"],
            _of_values(observed, trace_values),
            np.isin(trace_values["storage"], take("released", np.int64)),
            read_by_host,
            observed["op"],
            observed["as"],
            observed["hash"],
            observed["shape"],
            observed["at"],
            self.elements,
        )

    def _frame(self, frame: RecordFrame, generators: list[tuple[int, int]]) -> None:
        self.signatures.need(np.unique(frame.signature))
        kinds = self.signatures.kind[frame.signature]
        born = np.flatnonzero(frame.storage_origin != StorageOrigin.op)
        for row in born.tolist():
            self.born[frame.first_storage + row] = self._origin(frame, row)
        self.columns.add(storage_bytes=frame.storage_bytes)
        self._ops(frame, np.flatnonzero(kinds == RecordKind.op))
        if self.results is None:
            self._digests(frame, np.flatnonzero((kinds == RecordKind.digest) | (kinds == RecordKind.host_read)))
        rare = (RecordKind.storage_import, RecordKind.storage_resize, RecordKind.generator_state)
        outside = []
        for row in np.flatnonzero(np.isin(kinds, rare)).tolist():
            ordinal, (number, content) = frame.first_ordinal + row, self._entering(frame, row)
            if kinds[row] == RecordKind.generator_state:
                generators.append((ordinal, content))
            else:
                outside.append((number, 2 * ordinal - 1, content))
        storage, time, contents = zip(*outside, strict=True) if outside else ((), (), ())
        self.columns.add(
            outside_storage=np.array(storage, np.int64),
            outside_time=np.array(time, np.int64),
            outside_content=np.array(contents, U),
        )
        released = frame.ints[frame.int_first[np.flatnonzero(kinds == RecordKind.storage_release)]]
        hosts = np.flatnonzero(kinds == RecordKind.host_read)
        host_storage = frame.tensor_storage[frame.tensor_slots[frame.tensor_first[hosts]]]
        host_time = 2 * (frame.first_ordinal + hosts)
        self.columns.add(released=released, host_storage=host_storage, host_time=host_time)
        rows = np.flatnonzero(np.isin(kinds, (RecordKind.unsupported, RecordKind.collective))).tolist()
        unseen = [row for row in rows if self.reader.signatures[int(frame.signature[row])].unseen]
        self.columns.add(unseen=np.array(unseen, np.int64) + frame.first_ordinal)

    def _origin(self, frame: RecordFrame, row: int) -> int:
        origin, number = int(frame.storage_origin[row]), int(frame.storage_payload[row])
        if origin == StorageOrigin.uninitialized:
            return UNINITIALIZED
        return self._content(origin, number) if origin in _ORIGINS.values() else UNKNOWN

    def _entering(self, frame: RecordFrame, row: int) -> tuple[int, int]:
        """The storage or generator that a record sets, and the content it gets: UNKNOWN where that is not known."""
        number = int(frame.signature[row])
        kind = self.content_kinds.get(number)
        if kind is None:
            nodes = self.reader.signatures[number].args
            kind = next((node.kind for node in nodes if node.name == "payload"), ValueKind.none)
            self.content_kinds[number] = kind
        first = int(frame.int_first[row])
        origin = _ORIGINS.get(kind)
        content = UNKNOWN if origin is None else self._content(origin, int(frame.ints[first + 1]))
        return int(frame.ints[first]), content

    def _content(self, origin: int, number: int) -> int:
        if origin == StorageOrigin.payload:
            return self._payload(number)
        return (
            self._range(number)
            if origin == StorageOrigin.external_file
            else text_hash(repr(self.reader.recipes[number]))
        )

    def _payload(self, number: int) -> int:
        digest = self.reader.payload_info(number).digest
        low, high = (np.array([int(part, 16)], U) for part in (digest[16:], digest[:16]))
        return int(digest_content(low, high)[0])

    def _range(self, number: int) -> int:
        """A range of the same file: by its digest, or else by what identifies the file."""
        part = self.reader.file_ranges[number]
        if part.payload:
            return self._payload(part.payload)
        file = self.reader.files[part.file]
        return text_hash(f"{file.digest or (file.path, file.bytes, file.identity)} {part.offset} {part.bytes}") | 2

    def _ops(self, frame: RecordFrame, rows: np.ndarray) -> None:
        about, signature = self.signatures, frame.signature[rows].astype(np.int64)
        first, taken = frame.tensor_first[rows], about.arg_tensors[signature]
        slots = frame.tensor_slots[spans(first, taken)]
        place = spans(np.zeros(len(rows), np.int64), taken)
        meta, storage = frame.tensor_meta[slots], frame.tensor_storage[slots].astype(np.int64)
        geometry = mix(self.metas[meta], 1) ^ mix(frame.tensor_offset[slots], 2)
        form = _sums(mix(self.shapes[meta], place + 1), taken)
        key = about.key[signature] + _sums(mix(geometry, place + 1), taken)
        key += self._scalars(frame, rows, signature, place_from=1 << 20)
        for row in np.flatnonzero(np.isin(signature, list(about.elements))).tolist() if about.elements else ():
            self.elements[self.ops + row] = about.elements[int(signature[row])]
        # Writes: arguments by the schema, and results on memory that is not an argument's.
        op = np.arange(self.ops, self.ops + len(rows))
        made = frame.tensor_first[rows + 1] - first - taken
        result = frame.tensor_slots[spans(first + taken, made)]
        result_op, result_storage = np.repeat(op, made), frame.tensor_storage[result].astype(np.int64)
        both = (np.repeat(op, taken) << 32) + storage
        new = ~np.isin((result_op << 32) + result_storage, both) & (result_storage > 0)
        written = [first[i] + about.written[s] for i, s in enumerate(signature.tolist()) if len(about.written[s])]
        owner = [op[i] for i, s in enumerate(signature.tolist()) for _ in about.written[s]]
        in_place = frame.tensor_slots[np.concatenate(written)] if written else np.zeros(0, np.int64)
        slot = np.concatenate((in_place, result[new]))
        writer = np.concatenate((np.array(owner, np.int64), result_op[new]))
        order = np.argsort(writer, kind="stable")
        slot, writer = slot[order], writer[order]
        _, unique = np.unique((writer << 32) + frame.tensor_storage[slot], return_index=True)
        once = np.sort(unique)
        slot, writer, fresh = slot[once], writer[once], (order >= len(in_place))[once]
        keep = frame.tensor_storage[slot] > 0
        slot, writer, fresh = slot[keep], writer[keep], fresh[keep]
        count = np.bincount(writer - self.ops, minlength=len(rows))
        self.columns.add(
            ordinal=frame.first_ordinal + rows,
            key=key,
            loose=about.loose[signature] + np.where(count > 0, U(0), _sums(mix(self.ranks[meta], place + 1), taken)),
            form=form,
            draws=about.draws[signature],
            read_count=taken,
            read_storage=storage,
            read_id=frame.tensor_id[slots],
            read_geometry=geometry,
            write_count=count,
            write_op=writer,
            write_storage=frame.tensor_storage[slot],
            write_id=frame.tensor_id[slot],
            write_time=2 * (frame.first_ordinal + rows[writer - self.ops]) + 1,
            write_geometry=mix(self.metas[frame.tensor_meta[slot]], 1) ^ mix(frame.tensor_offset[slot], 2),
            write_fresh=fresh,
            write_span=self.meta_bytes[frame.tensor_meta[slot]],
        )
        self.ops += len(rows)

    def _scalars(self, frame: RecordFrame, rows: np.ndarray, signature: np.ndarray, place_from: int) -> np.ndarray:
        """The part of keys that numbers among the arguments are; notes those among the results as observations."""
        about = self.signatures
        count = frame.int_first[rows + 1] - frame.int_first[rows]
        ints = frame.ints[spans(frame.int_first[rows], count)].view(U) if count.any() else np.zeros(0, U)
        kinds = [about.int_kinds[s] for s in signature.tolist() if len(about.int_kinds[s])]
        kind = np.concatenate(kinds) if kinds else np.zeros(0, np.uint8)
        place = spans(np.zeros(len(rows), np.int64), count) + place_from
        total = _sums(np.where(kind == _PLAIN, mix(ints, place), U(0)), count)
        floats_count = frame.float_first[rows + 1] - frame.float_first[rows]
        floats = frame.floats[spans(frame.float_first[rows], floats_count)].astype(np.float64).view(U)
        place_f = spans(np.zeros(len(rows), np.int64), floats_count)
        argument = place_f < np.repeat(about.arg_floats[signature], floats_count)
        total += _sums(np.where(argument, mix(floats, place_f + 2 * place_from), U(0)), floats_count)
        seen = _sums(np.where(kind == _RESULT, mix(ints, place), U(0)), count)
        seen += _sums(np.where(argument, U(0), mix(floats, place_f)), floats_count)
        where = np.flatnonzero(seen)
        self.columns.add(
            scalar_op=where + self.ops, scalar_hash=seen[where], scalar_at=frame.first_ordinal + rows[where]
        )
        return total

    def _digests(self, frame: RecordFrame, rows: np.ndarray) -> None:
        kinds = self.signatures.kind[frame.signature[rows]]
        ints = frame.int_first[rows + 1] - frame.int_first[rows]
        rows = rows[(ints >= np.where(kinds == RecordKind.digest, 7, 5))]
        kinds = self.signatures.kind[frame.signature[rows]]
        start = frame.int_first[rows] + np.where(kinds == RecordKind.digest, 2, 0)
        of = np.where(
            kinds == RecordKind.digest, frame.ints[np.minimum(frame.int_first[rows], len(frame.ints) - 1)], -1
        )
        slot = frame.tensor_slots[frame.tensor_first[rows]]
        found = Hashed(
            of,
            frame.tensor_id[slot],
            frame.tensor_storage[slot],
            frame.tensor_meta[slot],
            frame.tensor_offset[slot],
            frame.ints[start].view(U),
            frame.ints[start + 1].view(U),
        )
        self._observe(found, frame.first_ordinal + rows)

    def _observe(self, found: Hashed, at: np.ndarray) -> None:
        """Digests, each in the record at an ordinal."""
        self.columns.add(
            digest_of=found.ordinal,
            digest_at=at,
            digest_id=found.tensor,
            digest_storage=found.storage,
            digest_hash=digest_content(found.low, found.high),
            digest_shape=self.shapes[found.meta],
            digest_geometry=mix(self.metas[found.meta], 1) ^ mix(found.offset, 2),
            digest_bytes=self.meta_bytes[found.meta],
        )

    def _values(
        self, read_storage: np.ndarray, read_time: np.ndarray, write_count: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """All values by time; and where each event is among them, those that ops wrote first."""
        take = self.columns.take
        storage_bytes = np.concatenate(([0], take("storage_bytes", np.int64)))
        writes, times = take("write_storage", np.int64), take("write_time", np.int64)
        outside = take("outside_storage", np.int64)
        outside_time, outside_content = take("outside_time", np.int64), take("outside_content", U)
        # What is read and nothing that was captured had written before was there from the start.
        first = np.full(len(storage_bytes), np.iinfo(np.int64).max)
        np.minimum.at(first, writes, times)
        np.minimum.at(first, outside, outside_time)
        earliest = np.full(len(storage_bytes), np.iinfo(np.int64).max)
        np.minimum.at(earliest, read_storage, read_time)
        there = np.flatnonzero(earliest < first)
        known = np.array([self.born.get(number, UNKNOWN) for number in there.tolist()], U)
        count, extra = len(writes), len(outside) + len(there)
        table = {
            "storage": np.concatenate((writes, outside, there)),
            "time": np.concatenate((times, outside_time, earliest[there] - 1)),
            "op": np.concatenate((take("write_op", np.int64), np.full(extra, -1))),
            "content": np.concatenate((np.zeros(count, U), outside_content, known)),
            "geometry": np.concatenate((take("write_geometry", U), np.zeros(extra, U))),
            "id": np.concatenate((take("write_id", np.int64), np.zeros(extra, np.int64))),
            "fresh": np.concatenate((take("write_fresh", bool), np.ones(extra, bool))),
        }
        span = np.concatenate((take("write_span", np.int64), np.zeros(extra, np.int64)))
        table["bytes"] = storage_bytes[table["storage"]]
        table["whole"] = table["fresh"] | (span >= table["bytes"])
        blank = [self.born.get(n) == UNINITIALIZED for n in table["storage"].tolist()]
        table["unwritten"] = np.array(blank, bool) & table["fresh"]
        order = np.argsort(table["time"], kind="stable")
        return {name: column[order] for name, column in table.items()}, order

    def _observed(self, ordinal: np.ndarray, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What was digested, with the op that wrote it: as a result of that op, or later."""
        take = self.columns.take
        of, at, storage = take("digest_of", np.int64), take("digest_at", np.int64), take("digest_storage", np.int64)
        op = np.searchsorted(ordinal, of)
        op[np.isin(of, ordinal, invert=True)] = -1  # of a collective, or damaged
        late = of < 0
        if late.any():
            last = _last(values["storage"], values["time"], storage[late], 2 * at[late])
            op[late] = np.where(last >= 0, values["op"][last], -1)
        place = np.full(len(of), -1)
        own = np.flatnonzero(~late)
        place[own] = spans(np.zeros(len(np.unique(of[own])), np.int64), np.unique(of[own], return_counts=True)[1])
        scalars = take("scalar_op", np.int64)
        count = len(scalars)
        return {
            "op": np.concatenate((op, scalars)),
            "as": np.concatenate((place, np.full(count, SCALAR))),
            "hash": np.concatenate((take("digest_hash", U), np.maximum(take("scalar_hash", U), U(2)))),
            "shape": np.concatenate((take("digest_shape", U), np.zeros(count, U))),
            "at": np.concatenate((at, take("scalar_at", np.int64))),
            "id": np.concatenate((take("digest_id", np.int64), np.zeros(count, np.int64))),
            "time": np.concatenate((np.where(late, 2 * at, 2 * of + 1), np.zeros(count, np.int64))),
            "geometry": np.concatenate((take("digest_geometry", U), np.zeros(count, U))),
            "storage": np.concatenate((storage, np.zeros(count, np.int64))),
            "bytes": np.concatenate((take("digest_bytes", np.int64), np.zeros(count, np.int64))),
        }


def _last(storage: np.ndarray, time: np.ndarray, of: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The last event of each storage before a time: its row, -1 if there is none."""
    if not len(storage):
        return np.full(len(of), -1)
    order = np.lexsort((time, storage))
    scale = int(max(time.max(initial=0), before.max(initial=0))) + 2
    stamps = storage[order] * scale + time[order] + 1
    place = np.searchsorted(stamps, of * scale + before + 1, side="left") - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (storage[found] == of), found, -1)


def _contents(values: dict[str, np.ndarray], observed: dict[str, np.ndarray]) -> np.ndarray:
    """What is known of the content of each value: of its whole storage, from digests of all that was written to it."""
    content = values["content"].copy()
    own = np.flatnonzero((observed["as"] >= 0) & (observed["as"] < SCALAR))
    key = observed["op"][own].astype(U) << U(40) | observed["id"][own].astype(U)
    order = np.argsort(key, kind="stable")
    key = key[order]
    wanted = values["op"].astype(U) << U(40) | values["id"].astype(U)
    place = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
    by_op = values["op"] >= 0
    digest = np.zeros(len(content), U)
    if len(key):
        hit = by_op & (key[place] == wanted)
        digest[hit] = observed["hash"][own][order][place[hit]]
    known = digest > 0
    whole = known & values["whole"]
    content[whole] = mix(digest[whole], 5) ^ values["geometry"][whole]
    content[by_op & ~known & values["unwritten"]] = UNINITIALIZED
    # What only a part was written of: with what was there before.
    part = np.flatnonzero(known & ~values["whole"])
    if len(part):
        before = _last(values["storage"], values["time"], values["storage"][part], values["time"][part])
        own_part = (mix(digest[part], 6) ^ mix(values["geometry"][part], 8)).tolist()
        for place_, earlier, own_hash in zip(part.tolist(), before.tolist(), own_part, strict=True):
            if earlier >= 0 and content[earlier]:
                content[place_] = hash((int(content[earlier]), own_hash)) & 0xFFFFFFFFFFFFFFFF | 2
    return content


def _of_values(observed: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> np.ndarray:
    """The first observation of each value that shows all of its memory, -1 for none."""
    value = _last(values["storage"], values["time"], observed["storage"], observed["time"] + 1)
    shown = np.flatnonzero((value >= 0) & (observed["storage"] > 0))
    shown = shown[observed["bytes"][shown] >= values["bytes"][value[shown]]]
    found = np.full(len(values["storage"]), -1)
    found[value[shown[::-1]]] = shown[::-1]
    return found


def _direct(
    observed: dict[str, np.ndarray], read_id: np.ndarray, read_time: np.ndarray, written: np.ndarray
) -> np.ndarray:
    """The last digest of the tensor that a read takes, -1 if something has written its storage since."""
    own = np.flatnonzero(observed["id"] > 0)
    if not len(own):
        return np.full(len(read_id), -1)
    time = observed["time"][own]
    last = _last(observed["id"][own], time, read_id, read_time)
    return np.where((last >= 0) & (time[last] >= written), own[last], -1)


def _randomness(ordinal: np.ndarray, key: np.ndarray, draws: np.ndarray, states: list[tuple[int, int]]) -> np.ndarray:
    """The state of the generators before each op that draws, as a hash; 0 for the others, and where it is unknown."""
    found = np.zeros(len(ordinal), U)
    now, waiting = 1, sorted(states)[::-1]
    for op in np.flatnonzero(draws).tolist():
        while waiting and waiting[-1][0] < ordinal[op]:
            _ordinal, content = waiting.pop()
            now = hash((2, content)) if content != UNKNOWN else 0
        if now:
            found[op] = now & 0xFFFFFFFFFFFFFFFF | 1
            now = hash((now, int(key[op])))
    return found


@dataclass(frozen=True)
class Side:
    """One capture: its reader, its columns, and results that replays made: by op and place among its results."""

    reader: CaptureReader
    trace: Trace
    replayed: Mapping[int, TensorDigest] | None = None  # by place of the observation

    def record(self, op: int) -> Record:
        return self.reader.record(int(self.trace.ordinal[op]))

    def ordinal(self, op: int) -> int:
        return int(self.trace.ordinal[op])

    def kernel(self, op: int) -> str:
        return self.reader.kernels[self.record(op).signature.kernel].qualified_name

    def scope(self, op: int) -> str:
        return self.reader.scope_path(self.record(op).scope)

    def call(self, op: int) -> str:
        """The op's kernel with what it is called with."""
        return str(signature_of(self.record(op), self.reader, values=True))
