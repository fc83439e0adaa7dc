"""Takes a trimmed capture's content from a replay of the original as it reaches the kept ops.

`DefinedBytes` knows which bytes of the result's storages are the same in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replayfmt.dump.selection import KeptRecords
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import KernelKind, OpStatus, RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import (
    GeneratorValue,
    PayloadValue,
    RangeValue,
    RecipeValue,
    Record,
    TensorDigest,
    TensorValue,
    Value,
    nested_values,
)
from replayfmt.format.signature_layout import argument_nodes
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.tensors.digests import digest_tensor
from replayfmt.pytorch.tensors.memory import host_view, storage_bytes
from replayfmt.recording.content.coverage import ByteRegion, Coverage
from replayfmt.recording.kernels import CapturedKernel, CodeKernel
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import OperatorKernel, ResolvedKernel

from .copying import Copier
from .schedule import EnterContent, Schedule
from .writing import EnteringContent, Writing


def region_of(tensor: torch.Tensor) -> ByteRegion:
    """A strided tensor as bytes of its storage."""
    item = tensor.element_size()
    return ByteRegion(
        int(tensor.storage_offset()) * item,
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
        item,
    )


class DefinedBytes:
    """Tracks the known bytes, by storage id. Storages it does not know are fully defined."""

    def __init__(self) -> None:
        self._unwritten: dict[int, Coverage] = {}
        self._opaque: set[int] = set()
        self._length: dict[int, int] = {}

    def entered(self, storage: int, length: int) -> None:
        """The whole content was imported."""
        self._unwritten.pop(storage, None)
        self._opaque.discard(storage)
        self._length[storage] = length

    def born(self, storage: int, length: int, *, written: bool, opaque: bool) -> None:
        """An op returned a new storage. `opaque`: it holds bytes that no replay reproduces."""
        self._length[storage] = length
        if opaque:
            self._opaque.add(storage)
        if not written and length:
            self._unwritten[storage] = Coverage(length)

    def wrote(self, storage: int, tensor: torch.Tensor, *, everything: bool) -> None:
        """An op wrote to a view: to every element (`everything`) or to some."""
        coverage = self._unwritten.get(storage)
        if coverage is None:
            return
        if everything:
            coverage.write(region_of(tensor))
            if coverage.complete:
                del self._unwritten[storage]
        else:
            coverage.touched = True

    def copied(self, storage: int, tensor: torch.Tensor, source: int, given: torch.Tensor) -> None:
        """An op copied `given`, of which not every element is known, to a view: each is as unknown there."""
        coverage, known = self._unwritten.get(storage), self._unwritten.get(source)
        if coverage is None:
            coverage = Coverage(self._length[storage])
            coverage.write(ByteRegion(0, (coverage.length,), (1,), 1))
        exact = source not in self._opaque and known is not None and known.exact
        written = known.written(region_of(given)) if exact and known is not None else None
        if written is None or not _broadcasts(written.shape, tuple(tensor.shape)):
            written = np.zeros(1, bool)
        coverage.assign(region_of(tensor), written)
        self._unwritten[storage] = coverage if coverage.exact else Coverage(coverage.length)

    def measure(self, storage: int, length: int) -> None:
        """A storage has a new length; added bytes are unwritten."""
        before = self._length.get(storage, length)
        self._length[storage] = length
        if length <= before:
            return
        coverage, known = Coverage(length), self._unwritten.get(storage)
        if before and known is None:
            coverage.write(ByteRegion(0, (before,), (1,), 1))
        self._unwritten[storage] = coverage

    def covers(self, storage: int, tensor: torch.Tensor) -> bool:
        """Whether every element of a view on a storage is known."""
        if storage in self._opaque:
            return False
        coverage = self._unwritten.get(storage)
        return coverage is None or coverage.covers(region_of(tensor))


class Materializer:
    """Watches a replay and writes the kept records. Call `finish` once the replay has ended.

    With `digests`, digests are written for the results of every kept op, up to the first unsupported record. Without
    `references`, all content is embedded as computed: no ranges of files, no recipes. Without `values` the captured
    result values are dropped: a replay with synthesized content does not reproduce them.
    """

    def __init__(
        self,
        plan: Plan,
        copier: Copier,
        schedule: Schedule,
        kept: KeptRecords,
        *,
        digests: bool,
        annotate: bool = True,
        references: bool = True,
        values: bool = True,
    ) -> None:
        self._plan = plan
        self._copier = copier
        self._schedule = schedule
        self._digests = digests
        self._references = references
        self._kept = kept
        self._writing = Writing(copier, schedule, kept, self, annotate=annotate, values=values)
        self._defined = DefinedBytes()
        self._kernel: dict[int, CapturedKernel] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}  # of the op that runs next, only while it runs
        self._record: Record | None = None
        self._states: dict[int, bytes] = {}  # generators, as the result expects them
        self.digest_count = 0

    def watches(self, ordinal: int) -> bool:
        return self._kept.holds(ordinal)

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        self._writing.up_to(ordinal)
        self._storages = storages
        for number, storage in storages.items():
            self._defined.measure(number, storage.nbytes())
        self._record = record = self._writing.write(self._state_generators)
        self._storages = {}
        self._bear(record, self._writing.born)

    def _bear(self, record: Record, storages: list[int]) -> None:
        """Note the storages that an op is about to return."""
        kernel = self._kernel_of(record)
        for number in storages:
            born = self._plan.reader.storage(number)
            self._defined.born(number, born.bytes, written=born.origin is not StorageOrigin.uninitialized, opaque=False)
        for index, place in enumerate(self._plan.reader.layouts[record.signature_id].results):
            if index in kernel.opaque_results:
                values = dict(self._slots((*record.args, *record.results), record))
                for slot in place.tensors:
                    self._defined.born(values[slot].storage, 0, written=True, opaque=True)

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        record = self._record
        assert record is not None and record.ordinal == ordinal
        kernel = self._kernel_of(record)
        values = dict(self._slots((*record.args, *record.results), record))
        for slot, tensor in {**args, **results}.items():
            if values[slot].storage:
                self._defined.measure(values[slot].storage, _length(tensor))
        written = self._written(record, kernel)
        source = next((slot for slot in self._slots_of(record, kernel, kernel.operator.copies) if slot in args), None)
        unknown = source is not None and not self._defined.covers(values[source].storage, args[source])
        for slot, tensor in ({slot: args[slot] for slot in written if slot in args} or results).items():
            number = values[slot].storage
            if number and slot in written:
                self._defined.wrote(number, tensor, everything=written[slot])
            if number and unknown and source is not None and number != values[source].storage:
                self._defined.copied(number, tensor, values[source].storage, args[source])
        self._states |= {number: self._state(number) for number in self._drawn(record)}
        unsupported = self._schedule.kept_unsupported
        if self._digests and not kernel.operator.empty and (unsupported is None or unsupported > ordinal):
            self._digest(record, kernel, results, args, values, written)

    def finish(self) -> None:
        self._writing.finish(self._record)

    def is_reproducible(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether every replay computes the same elements of a tensor of the op that ran last. Call it in `after`."""
        record = self._record
        assert record is not None
        value = dict(self._slots((*record.args, *record.results), record))[slot]
        return not self._kernel_of(record).operator.empty and self._defined.covers(value.storage, tensor)

    def _kernel_of(self, record: Record) -> CapturedKernel:
        number = record.signature.kernel
        if number not in self._kernel:
            self._kernel[number] = self._described(number, record.ordinal)
        return self._kernel[number]

    def _described(self, number: int, ordinal: int) -> CapturedKernel:
        """What a recorder knows of a kernel."""
        resolved, captured = self._plan.kernels[number], self._plan.reader.kernels[number]
        assert captured is not None, "signatures of ops have kernels"
        if isinstance(resolved, OperatorKernel):
            return CapturedKernel(resolved.overload, self._plan.preparation.opaque)
        if isinstance(resolved, ResolvedKernel) and captured.kind is not KernelKind.operator:
            return CodeKernel(captured.kind, captured.schema, resolved.call)
        reason = resolved if isinstance(resolved, str) else f"it is a {type(resolved).__name__}"
        raise ReplayRefused(
            f"{self._plan.reader.path}: ordinal {ordinal}: {captured.qualified_name} cannot be kept: "
            f"expected an operator of this PyTorch, {reason}; leave it out of the selection"
        )

    def _slots(self, values: tuple[Value, ...], record: Record) -> list[tuple[int, TensorValue]]:
        """The tensors of an op's arguments or results (or both, in that order), by slot."""
        found = [value for value in nested_values(values) if isinstance(value, TensorValue)]
        first = self._plan.reader.layouts[record.signature_id].arg_tensors if values is record.results else 0
        return list(enumerate(found, first))

    def _written(self, record: Record, kernel: CapturedKernel) -> dict[int, bool]:
        """Tensor slots of arguments that the op writes, and whether it writes every element of them."""
        return {
            slot: kernel.writes_all(index) for index in kernel.writes for slot in self._slots_of(record, kernel, index)
        }

    def _slots_of(self, record: Record, kernel: CapturedKernel, index: int) -> list[int]:
        places = self._plan.reader.layouts[record.signature_id].args
        return [slot for place in places if kernel.indices.get(place.node.name) == index for slot in place.tensors]

    def enter(self, action: EnterContent) -> EnteringContent:
        """The content imported before the op that runs next."""
        storage = self._storages.get(action.storage)
        if storage is None:
            raise AssertionError(f"storage {action.storage} enters before an op that does not use it")
        length = storage.nbytes()
        self._defined.entered(action.storage, length)
        if length == 0 or storage.device.type == "meta":
            return EnteringContent(StorageOrigin.uninitialized, 0, length)
        if action.absent:
            return EnteringContent(StorageOrigin.absent, 0, length)
        refers = self._references and action.first
        if refers and isinstance(action.source, RangeValue):
            given = self._plan.reader.file_ranges[action.source.id]
            if given is not None and given.bytes == length:
                return EnteringContent(StorageOrigin.external_file, self._copier.range(action.source.id), length)
        if refers and isinstance(action.source, RecipeValue):
            return EnteringContent(StorageOrigin.initializer, self._copier.recipe(action.source.id), length)
        source = action.source
        if action.unread and length == action.length:
            number = self._copier.content(memoryview(bytes(length)))  # takes no room, and shows no memory of before
        elif isinstance(source, PayloadValue) and self._plan.reader.payload_info(source.id).raw_bytes == length:
            number = self._copier.payload(source.id)
        else:
            number = self._copier.content(storage_bytes(storage))
        return EnteringContent(StorageOrigin.payload, number, length)

    def _drawn(self, record: Record) -> list[int]:
        """The ids of the generators that a kept op may draw from: those passed to it, else every default generator."""
        kernel, reader = self._kernel_of(record), self._plan.reader
        values = {node.name: value for node, value in zip(record.signature.args, record.args, strict=True)}
        if not kernel.random or not kernel.draws((), values):
            return []
        given = [value.id for value in values.values() if isinstance(value, GeneratorValue)]
        defaults = [number for number, each in enumerate(reader.generators) if each is not None and each.default]
        return [number for number in given or defaults if self._plan.generators[number] is not None]

    def _state_generators(self, record: Record) -> None:
        for number in self._drawn(record):
            state = self._state(number)
            if self._states.get(number) != state:
                self._writing.generator_state(record, number, state)
                self._states[number] = state

    def _state(self, number: int) -> bytes:
        generator = self._plan.generators[number]
        assert generator is not None
        state = generator.get_state()  # owns what the view shows
        return bytes(host_view(state.untyped_storage()))

    def _digest(
        self,
        record: Record,
        kernel: CapturedKernel,
        results: dict[int, torch.Tensor],
        args: dict[int, torch.Tensor],
        values: dict[int, TensorValue],
        written: dict[int, bool],
    ) -> None:
        """Digest every result of an op, and what it wrote that is not among them."""
        layout = self._plan.reader.layouts[record.signature_id]
        seen: set[int] = set()
        for index, place in enumerate(layout.results):
            for slot in place.tensors:
                if slot in results and index not in kernel.opaque_results:
                    self._compare_later(record, values[slot], results[slot], index)
                seen.add(values[slot].id)
        for slot in written:
            same = slot in args and tuple(args[slot].shape) == values[slot].meta.sizes  # not resized by the op
            if same and values[slot].id not in seen:
                self._compare_later(record, values[slot], args[slot], -1)

    def _compare_later(self, record: Record, value: TensorValue, tensor: torch.Tensor, result: int) -> None:
        """Write the digest of a tensor that an op returned, if every replay reproduces it."""
        if not value.storage or value.meta.flags & TensorFlag.zero or tensor.device.type == "meta":
            return
        if not self._defined.covers(value.storage, tensor):
            return
        if (record.ordinal, result, value.id) in self._schedule.digested:
            return  # the capture has this digest itself
        try:
            digest = digest_tensor(tensor)
        except TypeError:
            return  # packed elements: nothing to compare
        self._write_digest(record, value, result, digest)

    def _write_digest(self, record: Record, value: TensorValue, result: int, digest: TensorDigest) -> None:
        add_digest(self._copier, record, RecordKind.digest, [value, self._writing.ops[record.ordinal], result], digest)
        self.digest_count += 1


def _broadcasts(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether elements of these sizes can be copied to a tensor of those."""
    try:
        return np.broadcast_shapes(sizes, to) == to
    except ValueError:
        return False


def add_digest(copier: Copier, near: Record, kind: RecordKind, args: Sequence[Value], digest: TensorDigest) -> None:
    """Write a digest or host_read record: `args` are those before the digest."""
    statistics = [each for each in (digest.min, digest.max, digest.mean, digest.l2) if each is not None]
    whole, _reals = digest.slots()
    head = whole[: len(whole) - sum(isinstance(each, int) for each in digest.sample)]
    nodes = near.signature.args[: len(args)] if near.kind is kind else argument_nodes(kind)
    copier.add(near, kind, [*nodes, *digest.nodes()], [*args, *head, *statistics, list(digest.sample)])


def overwrites(plan: Plan, signature_id: int) -> tuple[int, ...]:
    """The tensor slots that ops of a signature overwrite completely without reading them."""
    layout = plan.preparation.scan(checks=False).layout(signature_id)
    resolved = plan.kernels[layout.signature.kernel]
    if layout.signature.status is not OpStatus.ok or not isinstance(resolved, ResolvedKernel):
        return ()
    if not operator_named(resolved.schema.name).overwrites_self:
        return ()
    name = resolved.schema.arguments[0].name
    return tuple(
        slot
        for place in layout.args
        for slot in place.tensors
        if place.node.name == name and place.node.kind is ValueKind.tensor
    )


def _length(tensor: torch.Tensor) -> int:
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage().nbytes()
