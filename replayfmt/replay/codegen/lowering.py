"""From records to windows: goes through a capture once, in order, and writes the code of each window.

Lowering knows which variables are live and what each is called. It decides nothing itself: the scan before it has
determined where windows are cut, when everything is last used and what is written. Ops are lowered in op_lowering.py;
this module handles the other records and the window boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from math import prod
from typing import Any

import torch

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import ITEM_BYTES, RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import MAPPED_FILE, Record, TensorDigest, TensorValue, spanned
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import NodePlace
from replayfmt.pytorch.environment import apply_settings
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, require_inside

from ..operations import Pausable, View, load_content, resize_storage, state_setter, synchronize
from ..planning.devices import DeviceMap
from ..planning.kernels import KernelStandIn, ResolvedKernel
from ..planning.scan import NOTHING, ContentSource, Scan, TensorKeys, enters
from ..verification import CompareLocation, Judge
from .call_templates import DirectFunctions, Template, TemplateMaker
from .streams import LateCopies, ReplayStreams, StreamCode, copies_late
from .windows import CodeCache, FrameLists, StagedStorage, Variables, Window, WindowText


class Shapes(IntEnum):
    """For which ops a replay that does not verify still checks the dtypes and sizes of results."""

    unchecked = 0
    content_decides = 1  # those whose result sizes depend on content, and custom operators
    all = 2


@dataclass
class Context:
    """What lowering gets from the plan: the capture, the mapping to this machine, and the objects of a running replay.

    `kernels` has the operator of each kernel id, None if there is none; `refused` has the op signatures that cannot be
    run. Both matter only to plans that keep going; others are refused. `load(storage, source, version, target)` puts
    new content into an existing storage. `draws_on` is the device that random ops of a CPU capture deliver their
    numbers to, None for the CPU itself. `opaque` has, by signature, the tensor slots of results with bytes that no
    replay reproduces, `unsteady` the ordinals of nondeterministic ops. `stand_in` replaces kernels with functions.
    """

    reader: CaptureReader
    devices: DeviceMap
    generators: tuple[torch.Generator | None, ...]
    kernels: tuple[ResolvedKernel | None, ...]
    templates: TemplateMaker
    clock: Pausable
    judge: Judge
    cache: CodeCache
    refused: Mapping[int, str]
    direct: DirectFunctions
    load: Callable[[int, ContentSource, int, torch.UntypedStorage], None]
    draws_on: torch.device | None = None
    shapes: Shapes = Shapes.unchecked
    opaque: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    unsteady: Collection[int] = ()
    stand_in: KernelStandIn | None = None
    streams: ReplayStreams | None = None  # None: the capture has nothing but default streams


class Lowering:
    """One pass over the records up to the scan's stop. `compare`: check digests, host reads and structures too."""

    def __init__(self, context: Context, scan: Scan, *, compare: bool) -> None:
        self.context = context
        self.scan = scan
        self.compare = compare
        self.reader = context.reader
        self.settings: dict[str, Any] = dict(context.reader.session.settings)
        self.variables = Variables()
        self.unbounded = False  # whether memory may have become shorter than its tensors
        self.names: dict[int, str] = {}  # live variables that have a name in this window
        self.text = WindowText()
        self.frame: FrameLists
        self._staged: list[StagedStorage] = []
        self._hoisted: list[tuple[int, int, View]] = []
        self._hoisted_on: set[int] = set()
        self._dropped: list[int] = []
        self._consumed: set[int] = set()
        self._templates: dict[int, Template | None] = {}
        self._opaque: set[int] = set()  # storages with bytes that no replay reproduces
        self._unsteady: set[int] = set()  # storages whose content depends on a nondeterministic op
        self.op_is_unsteady = False  # whether the results of the op being lowered do
        self._streams = None  # a slice of the ops runs one after the other, without what lies between them
        if context.streams is not None and scan.needed is None:
            self._streams = StreamCode(self, context.streams)
        captured = context.streams if self._streams is not None and self._streams.captured else None
        self._host = LateCopies(self, context.devices, captured) if copies_late(self.reader) else None
        self._kinds = self.reader.signature_kinds.tolist()

    def windows(self, op: Callable[[Lowering, int, int], None]) -> Iterator[Window]:
        """The windows in order; `op` lowers one op: (this lowering, row in the frame, ordinal)."""
        cuts = iter([*self.scan.window_cuts, self.scan.stop])
        cut = next(cuts)
        first = 0
        keys = TensorKeys(self.reader.metas)
        others: dict[int, Callable[[int, int], None]] = {
            RecordKind.scope_begin: self._scope,
            RecordKind.scope_end: self._scope,
            RecordKind.storage_import: self._import,
            RecordKind.storage_resize: self._resize,
            RecordKind.generator_state: self._generator_state,
            RecordKind.global_state: self._global_state,
            RecordKind.synchronize: self._synchronize,
        }
        streams, host = self._streams, self._host
        if streams is not None:
            others |= streams.handlers()
        needed = self.scan.needed
        if self.scan.checks:
            others |= {RecordKind.digest: self._digest, RecordKind.host_read: self._host_read}
        for index, info in enumerate(self.reader.record_frames):
            if info.first_ordinal >= self.scan.stop:
                break
            count = min(info.count, self.scan.stop - info.first_ordinal)
            self.frame = FrameLists(self.reader.frame(index), count, keys, self.scan)
            ordinal = info.first_ordinal
            for row, signature in enumerate(self.frame.signatures):
                if ordinal == cut:
                    yield self._finish(first, ordinal)
                    first, cut = ordinal, next(cuts)
                kind = self._kinds[signature]
                if needed is not None and not needed[ordinal]:
                    pass
                elif kind == RecordKind.op:
                    if streams is not None:
                        streams.before_op(row, ordinal)
                    if host is not None:
                        host.before_op(row, ordinal)
                    if self.context.unsteady:
                        self._follow_unsteady(signature, row, ordinal)
                    op(self, row, ordinal)
                    if signature in self.context.opaque:
                        first_slot = self.frame.tensor_first[row]
                        self._opaque.update(
                            self.frame.storages[first_slot + slot] for slot in self.context.opaque[signature]
                        )
                else:
                    handler = others.get(kind)
                    if handler is not None:
                        handler(row, ordinal)
                        if host is not None:
                            host.after_record(kind, row)
                ordinal += 1
        if self.scan.stop > first:
            yield self._finish(first, self.scan.stop)

    def _follow_unsteady(self, signature: int, row: int, ordinal: int) -> None:
        """Note whether an op's results depend on a nondeterministic op, and which memory does from here on."""
        frame, layout = self.frame, self.scan.layout(signature)
        first, end = frame.tensor_first[row], frame.tensor_first[row + 1]
        middle = first + layout.arg_tensors
        taken = frame.storages[first:middle]
        written = [first + slot for slot in self.scan.effects(signature).writes]
        template = self.template(signature)
        fresh = set() if template is None else {slot for slot in written if self._is_overwritten(template, slot, taken)}
        read = {frame.storages[slot] for slot in range(first, middle) if slot not in fresh}
        read.update(frame.ints[frame.int_first[row] + each.int_slot] for each in layout.nodes(ValueKind.storage))
        self.op_is_unsteady = ordinal in self.context.unsteady or not self._unsteady.isdisjoint(read)
        if self.op_is_unsteady:
            self._unsteady.update(frame.storages[slot] for slot in written)
            self._unsteady.update(set(frame.storages[middle:end]).difference(taken))
        else:
            self._unsteady.difference_update(frame.storages[slot] for slot in fresh)

    def _is_overwritten(self, template: Template, slot: int, taken: list[int]) -> bool:
        """Whether an op overwrites all of the storage of a slot that it writes, and reads none of it."""
        frame = self.frame
        storage, meta = frame.storages[slot], self.reader.metas[frame.metas[slot]]
        operator, schema = operator_named(template.kernel.schema.name), template.kernel.schema
        is_out = any(argument.is_out for argument in schema.arguments)
        if not (operator.overwrites_self or is_out) or taken.count(storage) > 1 or meta is None:
            return False
        elements = prod(meta.sizes)
        return (
            elements * ITEM_BYTES[meta.dtype] == self.reader.storage(storage).bytes
            and spanned(meta.sizes, meta.strides) == elements
        )

    def _finish(self, first: int, end: int) -> Window:
        """The window that ends before `end`; the next one starts empty."""
        if self._streams is not None and not self.text.returns_result:
            self._streams.end_window(end - 1)
        for storage in self._hoisted_on:
            # Staged storages go once views of them exist, which keep them alive.
            key = -storage
            if key in self.variables and key not in self.names and not self.variables.alone(key):
                self.drop([key])
        text = self.text
        outputs = [key for key, name in self.names.items() if name[0] == "v"]
        function = text.function(self.context.cache, [self.names[key] for key in outputs])
        window = Window(
            first,
            end - first,
            function,
            text.inputs,
            [key in self._consumed for key in text.inputs],
            outputs,
            self._staged,
            self._hoisted,
            self._dropped,
            text.line_ordinals,
            text.returns_result,
            text.kernel,
        )
        self.text, self.names = WindowText(), {}
        self._staged, self._hoisted, self._dropped, self._consumed = [], [], [], set()
        self._hoisted_on.clear()
        return window

    def template(self, signature: int) -> Template | None:
        """The template of an op's signature, None if its kernel has no operator here."""
        if signature not in self._templates:
            layout = self.scan.layout(signature)
            kernel = self.context.kernels[layout.signature.kernel]
            template = None
            if kernel is not None and signature not in self.context.refused:
                template = self.context.templates.make(signature, layout, kernel)
            self._templates[signature] = template
        return self._templates[signature]

    def checks_shapes(self, template: Template) -> bool:
        if self.compare:
            return True
        shapes = self.context.shapes
        return shapes is Shapes.all or (shapes is Shapes.content_decides and template.kernel.content_decides_sizes)

    def view(self, slot: int) -> View:
        """How to make the tensor of a slot from its storage."""
        meta = self.reader.metas[self.frame.metas[slot]]
        return View(TORCH_DTYPE[meta.dtype], meta.sizes, meta.strides, self.frame.offset(slot), meta.flags)

    def acquire(self, slot: int, ordinal: int) -> str:
        """The name of a slot's tensor in this window; it becomes an input, or is made, if it has no name yet."""
        frame, variables = self.frame, self.variables
        key, storage = frame.keys[slot], frame.storages[slot]
        if key in variables:
            return self._named(key)
        meta = self.reader.metas[frame.metas[slot]]
        if meta.flags & TensorFlag.zero:
            name = self.text.register()
            # Without bytes, as forward-mode autograd uses them.
            device = self.context.devices.target(meta.device)
            zeros = partial(torch._efficientzerotensor, meta.sizes, dtype=TORCH_DTYPE[meta.dtype], device=device)
            self.text.line(ordinal, f"{name} = {self.text.constant(zeros)}()")
            self._define(key, storage, name, ordinal)
            return name
        base, view = self._base(storage, ordinal), self.view(slot)
        if base == -storage and base not in self.names and view.end_bytes <= self.reader.storage(storage).bytes:
            # Made before the window, so that it costs no replay time: its content also entered before.
            self._hoisted.append((key, base, view))
            self._hoisted_on.add(storage)
            name = self.text.input(key)
        else:
            base_name = self._named(base)
            name = self.text.register()
            self.text.line(ordinal, f"{name} = {self.text.constant(view)}({base_name})")
        self._define(key, storage, name, ordinal)
        return name

    def storage(self, storage: int, ordinal: int) -> str:
        """The name of any variable on a storage."""
        return self._named(self._base(storage, ordinal))

    def _named(self, key: int) -> str:
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = self.text.input(key)
        return name

    def _define(self, key: int, storage: int, name: str, ordinal: int) -> None:
        self.drop_after(self.variables.define(key, storage), ordinal)
        self.names[key] = name

    def _base(self, storage: int, ordinal: int) -> int:
        """Any variable on a storage."""
        base = self.variables.base(storage)
        if base is not None:
            return base
        if not storage:
            raise ReplayRefused(
                f"{self.reader.path}: ordinal {ordinal} uses a tensor without memory that nothing "
                "before it produced; the capture contradicts itself, capture it again"
            )
        born = self.reader.storage(storage)
        device = self.reader.devices[born.device]
        if born.bytes and device.kind != "meta" and born.origin is not StorageOrigin.absent:
            raise ReplayRefused(
                f"{self.reader.path}: ordinal {ordinal} uses storage {storage}, which nothing before "
                "it produced or imported; the capture contradicts itself, capture it again"
            )
        self._stage(storage, NOTHING)
        return -storage

    def _stage(self, storage: int, source: ContentSource, *, in_file: bool = False) -> None:
        born = self.reader.storage(storage)
        self._staged.append(
            StagedStorage(storage, source, born.bytes, self.context.devices.target(born.device), in_file)
        )
        self.variables.define(-storage, storage)

    def drop(self, keys: list[int]) -> list[str]:
        """Release variables that are no longer needed; returns the names to delete."""
        if not keys:
            return []
        self.variables.forget(keys)
        names = []
        for key in keys:
            name = self.names.pop(key, None)
            if name is None:
                self._dropped.append(key)
                continue
            if name[0] == "i":
                self._consumed.add(key)
            names.append(name)
        return names

    def drop_after(self, keys: list[int], ordinal: int) -> None:
        """Release variables on a separate line."""
        names = self.drop(keys)
        if names:
            self.text.line(ordinal, f"del {', '.join(names)}")
            for name in names:
                self.text.free(name)

    def expire(self, storage: int, ordinal: int) -> None:
        """Note that a record other than an op used a storage, perhaps for the last time."""
        if self.scan.last_use_of(storage) == ordinal:
            self.drop_after(self.variables.all_on(storage), ordinal)

    def _fields(self, row: int) -> tuple[dict[str, NodePlace], Callable[[str], int]]:
        """The arguments of a record other than an op by name, and what gives the number of one."""
        fields = {each.node.name: each for each in self.scan.layout(self.frame.signatures[row]).args}
        first = self.frame.int_first[row]
        return fields, lambda name: self.frame.ints[first + fields[name].int_slot]

    def _scope(self, row: int, ordinal: int) -> None:
        signature = self.reader.signatures[self.frame.signatures[row]]
        event = "begin" if signature.kind is RecordKind.scope_begin else "end"
        values = (signature.args[0].constant, self.reader.scope_path(self.frame.scopes[row]), ordinal)
        constants = ", ".join(self.text.constant(value) for value in values)
        self.text.line(ordinal, f"if s is not None: s('{event}', {constants})")

    def _import(self, row: int, ordinal: int) -> None:
        fields, number = self._fields(row)
        storage = number("storage")
        kind = fields["payload"].node.kind
        source = NOTHING if kind is ValueKind.none else ContentSource(kind, number("payload"))
        version = number("version")
        self._opaque.discard(storage)
        self._unsteady.discard(storage)
        if enters(version, self.reader.storage(storage)):
            if self.scan.last_use_of(storage) >= 0:
                self._stage(storage, source, in_file=fields["reason"].node.constant == MAPPED_FILE)
            return
        if self.scan.last_use_of(storage) < 0:
            return
        load = partial(load_content, partial(self.context.load, storage, source, version), self.context.clock)
        self.text.line(ordinal, f"{self.text.constant(load)}({self.storage(storage, ordinal)})")
        self.expire(storage, ordinal)

    def _resize(self, row: int, ordinal: int) -> None:
        _places, number = self._fields(row)
        storage = number("storage")
        if self.scan.last_use_of(storage) < 0:
            return
        if self._streams is not None:
            self._streams.before_resize(storage, row, ordinal)
        resize = partial(resize_storage, number("bytes"))
        self.unbounded = True
        self.text.line(ordinal, f"{self.text.constant(resize)}({self.storage(storage, ordinal)})")
        self.expire(storage, ordinal)

    def _generator_state(self, row: int, ordinal: int) -> None:
        fields, number = self._fields(row)
        generator = self.context.generators[number("generator")]
        if generator is None:
            return  # nothing draws from it here: ops that would are refused
        if fields["payload"].node.kind is ValueKind.none:
            self.text.line(ordinal, f"{self.text.constant(partial(generator.manual_seed, ordinal))}()")
            return
        state = bytes(self.reader.payload(number("payload")))
        self.text.line(ordinal, f"{self.text.constant(state_setter(generator, state))}()")

    def _global_state(self, row: int, ordinal: int) -> None:
        layout = self.scan.layout(self.frame.signatures[row])
        frame = self.frame
        changes = {
            each.node.name: self.context.templates.builder(each)(
                frame.ints, frame.int_first[row], frame.floats, frame.float_first[row]
            )
            for each in layout.args
        }
        self.settings.update(changes)
        self.text.line(ordinal, f"{self.text.constant(partial(apply_settings, changes))}()")

    def _synchronize(self, row: int, ordinal: int) -> None:
        device = self.scan.layout(self.frame.signatures[row]).args[0].node.constant
        assert isinstance(device, int)
        self.text.line(ordinal, f"{self.text.constant(partial(synchronize, self.context.devices.target(device)))}()")

    def _digest(self, row: int, ordinal: int) -> None:
        record = self.reader.record(ordinal)
        of, result = record.argument("of"), record.argument("result")
        assert isinstance(of, int) and isinstance(result, int)
        self._compare(row, record, CompareLocation(ordinal if of < 0 else of, None if result < 0 else result, ordinal))

    def _host_read(self, row: int, ordinal: int) -> None:
        self._compare(row, self.reader.record(ordinal), CompareLocation(ordinal, None, ordinal))

    def _compare(self, row: int, record: Record, where: CompareLocation) -> None:
        ordinal, host_read = record.ordinal, record.kind is RecordKind.host_read
        expected, tensor = TensorDigest.from_record(record), record.argument("tensor")
        slot = self.frame.tensor_first[row]
        key = self.frame.keys[slot] if slot < self.frame.tensor_first[row + 1] else None
        opaque = not host_read and isinstance(tensor, TensorValue) and tensor.storage in self._opaque
        if self.compare and expected is not None and isinstance(tensor, TensorValue) and not opaque:
            name = self.names.get(self.frame.keys[slot]) or self.acquire(slot, ordinal)
            if self._streams is not None:
                self._streams.before_reading(ordinal)
            if self._host is not None:
                self._host.before_reading(slot, ordinal)
            unsteady = tensor.storage in self._unsteady
            check = partial(self.context.judge.digest, where, expected, host_read=host_read, unsteady=unsteady)
            if self.unbounded:
                name = f"{self.text.shared('inside', require_inside)}({name})"
            self.text.line(ordinal, f"{self.text.constant(check)}({name})")
        if key is None:
            return
        if self.frame.storage_ends[slot]:
            self.drop_after(self.variables.all_on(self.frame.storages[slot]), ordinal)
        elif self.frame.ends[slot] and key in self.variables:
            if self.variables.alone(key):
                self.variables.keep_idle(key)
            else:
                self.drop_after([key], ordinal)
