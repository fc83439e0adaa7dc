"""One operator call as the capture sees it: what must be recorded before it runs, and its record after.

A call that overwrites a part of its first argument writes only the elements that its indices, or its mask, name
(`places_written`).
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from replayfmt.format.codes import OpStatus
from replayfmt.format.model import Signature
from replayfmt.pytorch.collectives import LAUNCH
from replayfmt.pytorch.operators import OpaqueResults
from replayfmt.pytorch.tensors.memory import (
    call_undispatched,
    dtype_of,
    host_view,
    is_zerotensor,
    offset_of,
    shape_of,
    storage_of,
)

from .arguments import CallValues, Encoder, OpCall, TensorUse, op_signature
from .composite_operators import autocast_below_mode
from .content.coverage import ByteRegion
from .content.storage_content import content_of, sample
from .kernels import CapturedKernel, tensors_in
from .special_values import Handles, Unpacked, is_wrapper
from .storages.digesting import LISTED, Digests
from .storages.identity import Storages
from .storages.trackers import Tracker, Unwritten
from .stream.buffer import RecordBuffer
from .stream.program_state import Generators, NumericState, drawn_from, unknown_generators
from .stream.records import Records, TensorMetas, Unrepresentable

Places = np.ndarray | list[ByteRegion]  # by element, whether it is written; or parts of the view that are
_ELEMENTS = 1 << 20  # of the first argument, at most, for a trial
_RUNS = 64  # of successive indices
_VALUES = ("value", "values", "source", "src", "fill_value")
_ALONG_A_DIMENSION = ("aten::index_copy_", "aten::index_fill_")


def places_written(
    kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], region: ByteRegion
) -> Places | None:
    """Where a call is about to write. `region`: the bytes of its first argument. None if that takes too long to find
    out, or the memory is a device's."""
    target = args[0]
    if target.device.type != "cpu":
        return None
    given = {kernel.arguments[index].name: value for index, value in enumerate(args)} | kwargs
    if target.numel() <= _ELEMENTS:
        return call_undispatched(_by_trial, kernel, given)
    along = _along(kernel.name, given)
    return None if along is None else call_undispatched(_parts, region, *along)


def _by_trial(kernel: CapturedKernel, given: dict[str, Any]) -> np.ndarray:
    """Have the operator write True where nothing is true."""
    written = torch.zeros(given["self"].shape, dtype=torch.bool)
    values = {
        name: torch.ones(value.shape, dtype=torch.bool) if isinstance(value, torch.Tensor) else True
        for name, value in given.items()
        if name in _VALUES
    }
    kernel.func(**(given | values | {"self": written}))
    return written.numpy()


def _along(name: str, given: dict[str, Any]) -> tuple[int, torch.Tensor] | None:
    """The dimension and the indices of a call that writes whole slices."""
    if name in _ALONG_A_DIMENSION:
        return given["dim"] % given["self"].dim(), given["index"]
    indices = given.get("indices")
    if name not in ("aten::index_put_", "aten::_index_put_impl_") or not isinstance(indices, list | tuple):
        return None
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return used[0] if len(used) == 1 and used[0][1].dtype in (torch.int64, torch.int32) else None


def _parts(region: ByteRegion, dim: int, index: torch.Tensor) -> list[ByteRegion] | None:
    """The slices at these indices."""
    size, stride = region.sizes[dim], region.strides[dim]
    places = np.unique((index.cpu().reshape(-1).to(torch.int64) % size).numpy())
    parts = []
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else ():
        sizes = (*region.sizes[:dim], len(run), *region.sizes[dim + 1 :])
        parts.append(ByteRegion(region.start + int(run[0]) * stride, sizes, region.strides, region.item))
    return parts if len(parts) <= _RUNS else None


class PassedThrough(Exception):
    """The op returned a wrapper subclass: the tensors inside it are recorded separately."""


class CallRecorder:
    def __init__(
        self,
        buffer: RecordBuffer,
        records: Records,
        metas: TensorMetas,
        storages: Storages,
        generators: Generators,
        numeric: NumericState,
        digests: Digests,
        handles: Handles,
        *,
        digest_results: bool,
        digests_anything: bool,
        scalars: bool,
        opaque: OpaqueResults,
        threads: list[int],
    ) -> None:
        """`digest_results`: of every op, `digests_anything`: at all. `scalars`: record the scalars that ops return.
        `opaque`: the results that are never compared."""
        self._buffer = buffer
        self._records = records
        self._metas = metas
        self._storages = storages
        self._generators = generators
        self._numeric = numeric
        self._digests = digests
        self._handles = handles
        self._digest_results = digest_results
        self._digests_anything = digests_anything
        self._opaque = opaque
        self._threads = threads
        self._kernels: dict[int, CapturedKernel] = {}
        self.some_replaced = False
        self._writing: weakref.WeakSet[OpCall] = weakref.WeakSet()  # calls in progress that write
        self._listed: list[int] = []  # the list that a composite is turning into a tensor
        unpacked = Unpacked()
        self._arguments = Encoder(
            self._use_argument, self._use_storage, generators.number, records.device, self._given_integer, unpacked
        )
        self._scalars = scalars
        self._results = Encoder(
            self._use_result, self._result_storage, generators.number, records.device, self._returned_integer, unpacked
        )

    def kernel_of(self, func: torch._ops.OpOverload) -> CapturedKernel:
        """The description of an overload, computed at its first call."""
        kernel = self._kernels.get(id(func))
        if kernel is None:
            kernel = self._kernels[id(func)] = CapturedKernel(func, self._opaque)
        return kernel

    def look_again(self) -> bool:
        """Kernels were registered, or are gone. Returns whether calls of known operators have to be recorded in another
        way: `some_replaced` from then on."""
        changed = any([kernel.find_kernels() for kernel in self._kernels.values()])
        self.some_replaced |= changed
        return changed

    @property
    def operators(self) -> list[tuple[str, str, int]]:
        """Name, overload and number of results of each operator called so far."""
        return [(kernel.name, kernel.overload, kernel.results) for kernel in self._kernels.values()]

    # ---------------------------------------------------------------------------------------------------------- before

    def before(
        self,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: list[tuple[torch.Generator, bytes, bytes]] | None = None,
        autocast: Callable[[bool], dict[str, str]] = autocast_below_mode,
    ) -> OpCall:
        """Record what the op needs: state, content. `autocast` reads the autocast state that it runs under. `drawn`:
        the op has already run, under the settings that the stream states, and these generators had these states before
        and after. Raises Unrepresentable."""
        if kernel.unnameable:
            raise Unrepresentable("opaque_argument", kernel.unnameable)
        if kernel.state_argument is not None:
            self._handles.check_state(
                kernel.state_argument, kernel.argument(kernel.indices[kernel.state_argument], args, kwargs)
            )
        call = OpCall(kernel, args, kwargs, ran=drawn is not None)
        if drawn is None:
            self._numeric.check(kernel.name)
            if kernel.operator.casts_inside:
                self._numeric.check_autocast(autocast(kernel.own))
        self._arguments.arguments(call)
        if kernel.writes and kernel.operator.writes_some and not call.ran:
            self._before_partial_write(call)
        if kernel.assumed and self._storages.compares and drawn is None:
            uses = [use for use in call.values.uses if use.argument in kernel.assumed]
            call.contents = [(use, content_of(use.storage)) for use in uses]
        if kernel.writes:
            self._writing.add(call)
        for generator, before, after in drawn or ():
            self._generators.drew(generator, before, after)
        if kernel.random and kernel.draws(args, kwargs):
            self._note_draws(call, drawn is None)
        return call

    def _before_partial_write(self, call: OpCall) -> None:
        """A call is about to write a part of a tensor: find out which, if its memory is partly unwritten. If digests
        could not list what is written then, the rest enters as it is."""
        use = next((use for use in call.values.uses if use.argument == 0), None)
        state = None if use is None else use.tracker.state
        if use is None or state is None or state.coverage is None:
            return
        region = self._metas.params[use.meta].region(int(offset_of(use.tensor)))
        places = places_written(call.kernel, call.args, call.kwargs, region)
        if places is not None:
            after = state.coverage.copy()
            after.write_places(region, places)
            if len(after.ranges()) <= LISTED:
                call.places = places
                return
        self._storages.enter_unwritten(use.tracker, use.storage, call.kernel.name)

    def being_written(self) -> set[int]:
        """The addresses of storages that calls in progress on the complete path write: a replay does not have what they
        hold now."""
        uses = [use for call in self._writing for use in call.values.uses if use.argument in call.kernel.writes]
        trackers = [use.tracker for use in uses]
        bases = [tracker.state.alias_of for tracker in trackers if tracker.state is not None]
        storages = [tracker() for tracker in (*trackers, *bases) if tracker is not None]
        return {storage._cdata for storage in storages if storage is not None}

    def _note_draws(self, call: OpCall, is_about_to_run: bool) -> None:
        devices = self._devices(call)
        generators = drawn_from(call.args, call.kwargs, devices)
        given = any(isinstance(value, torch.Generator) for value in (*call.args, *call.kwargs.values()))
        unknown = [] if given else unknown_generators(devices)
        if unknown:
            raise Unrepresentable(
                "unseen_draws",
                f"it may draw random numbers on {', '.join(unknown)}, and PyTorch's module for such devices does not "
                "show their default generator",
            )
        if is_about_to_run:
            call.generators = generators
            self._generators.before(generators)

    @staticmethod
    def _devices(call: OpCall) -> set[torch.device]:
        device = call.kwargs.get("device")
        devices = {use.storage.device for use in call.values.uses}
        if device is not None:
            devices.add(torch.device(device))
        if call.kernel.namespace != "aten":
            devices.add(torch.device("cpu"))
        return devices

    def use_of(self, kernel: CapturedKernel, index: int, tensor: torch.Tensor) -> TensorUse:
        """A plain tensor is about to be an argument of an operator of ours: see `issued`. Raises Unrepresentable."""
        return self._use_argument(OpCall(kernel, (), {}), tensor, index)

    def register_storage(self, tensor: torch.Tensor) -> None:
        """Before an op of PyTorch's own uses a plain tensor: if the capture does not know its storage, it enters."""
        storage = storage_of(tensor)
        if self._storages.tracker_of(storage) is None:
            self._view(self._storages.enter(storage, dtype_of(tensor)), tensor, zero=False)

    def _view(self, tracker: Tracker, tensor: torch.Tensor, zero: bool) -> tuple[int, int]:
        """The meta id of a tensor in a storage, and its tensor id."""
        meta = self._metas.of(tensor, zero)
        return meta, self._storages.view(tracker, meta, int(offset_of(tensor)), self._metas.params[meta].item)

    def _use_argument(self, call: OpCall, tensor: torch.Tensor, index: int) -> TensorUse:
        storage = storage_of(tensor)
        zero = is_zerotensor(tensor)
        storages = self._storages
        meta, offset = self._metas.of(tensor, zero), int(offset_of(tensor))
        tracker = entered_before = storages.tracker_of(storage)
        if tracker is None:
            tracker = storages.enter(storage, dtype_of(tensor))
        # What began to need care while the op ran needed none when it began, and may hold what the op wrote by now.
        careful = tracker.size != storage.nbytes() and not (call.ran and tracker.size < 0)
        region = self._metas.params[meta].region(offset) if careful else None
        kernel, beside = call.kernel, False
        if region is not None and kernel.arguments[index].written:
            beside = storages.look_beside(call.beside, tracker, region)
        if careful and (entered_before is not None or tracker.alias or beside):
            reads = shape_of(tensor).numel() != 0 and kernel.reads(index, call.args, call.kwargs)
            writes = kernel.arguments[index].written
            as_is = kernel.operator.packs or (writes and not kernel.own)
            copied = index == kernel.operator.copies
            unwritten = (
                Unwritten.as_is
                if as_is
                else Unwritten.copied
                if copied
                else Unwritten.passed_on
                if kernel.elementwise
                else Unwritten.unseen
            )
            if kernel.name == LAUNCH:  # PyTorch's own C++ code fills some of what it sends
                unwritten = Unwritten.explained
            if self._listed and kernel.own and self._holds_list(tensor, storage):
                unwritten = Unwritten.explained
            if kernel.operator.packs:  # what packed parameters are copied or loaded by fills the weight unseen
                storages.filled(tracker, storage)
            tracker = storages.use(tracker, storage, reads, kernel.name, unwritten, region, writes and not kernel.own)
        if tracker.imports and not call.kernel.own and not (tracker.state is not None and tracker.state.arbitrary):
            self._handles.check_content(tensor)
        number = storages.view(tracker, meta, offset, self._metas.params[meta].item)
        return TensorUse(index, tensor, storage, tracker, number, meta)

    def _holds_list(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether host memory holds the list that a composite has just turned into a tensor."""
        code = {torch.float32: "f", torch.float64: "d"}.get(dtype_of(tensor))
        if code is None or storage.device.type != "cpu" or shape_of(tensor).numel() != len(self._listed):
            return False
        return bytes(host_view(storage)) == struct.pack(f"{len(self._listed)}{code}", *self._listed)

    def _given_integer(self, call: OpCall, value: int) -> int | torch.Tensor:
        """What is recorded for a large integer that was passed to the op."""
        tensor = None if call.kernel.own else self._handles.passed(value)
        return value if tensor is None else tensor

    def _returned_integer(self, call: OpCall, value: int) -> int | torch.Tensor | None:
        """What is recorded for a large integer that the op returned."""
        if call.kernel.own:  # read out of a tensor: no number to compare, and no new object
            return value if self._handles.tensor_of(value) is None else None
        tensor = self._handles.returned(value)
        return value if tensor is None else tensor

    def _use_storage(self, call: OpCall, storage: torch.UntypedStorage, index: int) -> int:
        tracker = self._storages.tracker_of(storage)
        if tracker is None:
            tracker = self._storages.enter(storage, _dtype_beside(call))
        elif tracker.size != storage.nbytes():
            reads = storage.nbytes() != 0 and call.kernel.reads(index, call.args, call.kwargs)
            tracker = self._storages.use(tracker, storage, reads, call.kernel.name)
        state = tracker.state
        if state is not None and state.alias_of is not None and (state.delta or state.length != state.alias_of.size):
            raise Unrepresentable("overlapping_storages", "a storage that is a part of another one was passed as such")
        return tracker.id

    # ----------------------------------------------------------------------------------------------------------- after

    def after(self, call: OpCall, result: Any, started: int, ended: int) -> int:
        """The op returned: its record's signature. Raises Unrepresentable or PassedThrough if it was not recorded."""
        kernel = call.kernel
        if kernel.operator.makes_tensor_of:
            listed = kernel.argument(kernel.indices[kernel.operator.makes_tensor_of], call.args, call.kwargs)
            self._listed = listed if isinstance(listed, list) else []
        values = self._results.results(call, result, scalars=self._scalars)
        for value in () if kernel.own or not kernel.results else (result,) if kernel.results == 1 else result:
            if type(value) is int:
                self._handles.made(value)
        if not kernel.own and kernel.results and not kernel.view:
            self._note_aliases(call, values)
        unchanged = self._compare(call) if call.contents else []
        kernel = call.kernel
        if self._threads:
            self._numeric.check(kernel.name)  # another thread's op may have recorded its own settings meanwhile
        signature = self._commit(call, OpStatus.ok, values, started, ended)
        self._note_writes(call, values)
        if call.generators:
            self._generators.after(call.generators)
        ordinal = self._buffer.appended - 1
        if self._digest_results:
            self._digest(call, values, ordinal)
        if self._digests_anything:
            for use in unchanged:
                self._digest_use(use.tensor, -1, ordinal)  # so that a replay that changes it is found
        return signature

    def _note_aliases(self, call: OpCall, values: CallValues) -> None:
        """Note results of a custom operator that are its arguments' memory, though its schema does not say so."""
        returns = getattr(getattr(call.kernel.func, "_schema", None), "returns", ())
        if any(each.alias_info is not None for each in returns):
            return
        given = {use.storage._cdata: call.kernel.arguments[use.argument].name for use in call.values.uses}
        for use in values.uses:
            name = given.get(use.storage._cdata)
            if name is not None and use.storage.nbytes():
                self._records.notes[
                    f"{call.kernel.name} returns the memory of its argument {name!r}, which its schema does not "
                    "declare (Tensor(a))"
                ] = None

    def _compare(self, call: OpCall) -> list[TensorUse]:
        """Have the call's kernel say what the call changed of that which counted as written. Returns what it left."""
        unchanged = []
        for use, before in call.contents:
            if before is not None and before == content_of(use.storage):
                unchanged.append(use)
        same = {use.argument for use in unchanged}
        call.kernel = call.kernel.found_to_change([index for index in call.kernel.assumed if index not in same])
        return unchanged

    def raised(self, call: OpCall, started: int, ended: int, interrupted: bool) -> None:
        """The op raised: it has no results. `interrupted`: a signal handler raised."""
        if interrupted:
            # Ctrl-C, exit, a timeout: not the op's own doing, and no replay would raise. What it wrote is imported
            # again.
            for use in call.values.uses:
                self._storages.mark_written_outside(use.tracker)
            return
        self._commit(call, OpStatus.raised, CallValues(), started, ended)
        if call.generators:
            self._generators.after(call.generators)

    def _use_result(self, call: OpCall, tensor: torch.Tensor, index: int) -> TensorUse:
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            raise PassedThrough
        storage = storage_of(tensor)
        zero = is_zerotensor(tensor)
        storages = self._storages
        tracker = storages.tracker_of(storage)
        if tracker is None:
            tracker = storages.produced(storage, uninitialized=call.kernel.operator.empty and not _fills_empty())
            # Only other packages' operators return addresses, which tensors of the recorder stand for.
            if index in call.kernel.opaque_results or (not call.kernel.own and self._handles.stands_for(storage)):
                storages.state(tracker).opaque = True
            storages.synchronize(tracker, storage)
        meta, number = self._view(tracker, tensor, zero)
        return TensorUse(index, tensor, storage, tracker, number, meta)

    def _result_storage(self, _call: OpCall, storage: torch.UntypedStorage, _index: int) -> int:
        tracker = self._storages.tracker_of(storage)
        return (tracker or self._storages.produced(storage, uninitialized=False)).id

    def _commit(self, call: OpCall, status: OpStatus, values: CallValues, started: int, ended: int) -> int:
        given, kernel = call.values, call.kernel
        key = (kernel, status, len(call.args), tuple(call.kwargs), tuple(given.key), tuple(values.key))
        signature = self._records.signature(key, lambda: op_signature(call, values, self._kernel_id(kernel), status))
        words = (*given.tensors, *values.tensors, *given.ints, *values.ints)
        self._buffer.append_op(signature, words, (*given.floats, *values.floats), started, ended)
        return signature

    def issued(
        self,
        kernel: CapturedKernel,
        constants: tuple[Any, ...],
        args: tuple[Any, ...],
        words: Sequence[int],
        started: int,
        ended: int,
    ) -> None:
        """Record a call of an operator of ours without results, which settings do not change. Of its arguments, tensors
        are KnownTensors; `constants` and the kernel determine the signature, `words` fill its slots."""

        def make() -> Signature:
            call = OpCall(kernel, args, {})
            self._arguments.arguments(call)
            return op_signature(call, CallValues(), self._kernel_id(kernel), OpStatus.ok)

        self._buffer.append_op(self._records.signature((kernel, *constants), make), words, (), started, ended)

    def arrived(self, tracker: Tracker, storage: torch.UntypedStorage, tensor: int, meta: int, offset: int) -> None:
        """The call just recorded wrote all of a view."""
        self._storages.wrote(tracker, storage, tensor, meta, offset, True)
        if self._digest_results:
            self._digest_view(tracker, storage, meta, offset, -1, self._buffer.appended - 1)

    def _kernel_id(self, kernel: CapturedKernel) -> int:
        if not kernel.id:
            kernel.id = self._buffer.writer.kernel(kernel.definition(self._buffer.writer))
        return kernel.id

    def _note_writes(self, call: OpCall, values: CallValues) -> None:
        kernel = call.kernel
        unknown = self._unknown_in(call) if kernel.operator.copies >= 0 else []
        if kernel.writes:
            writes = kernel.writes_in(call.args, call.kwargs)
            for use in call.values.uses:
                if use.argument not in writes:
                    continue
                if unknown:
                    self._copied(call, use, unknown)
                else:
                    self._wrote(use.tensor, kernel.writes_all(use.argument), call.places)
            if call.beside:
                self._storages.compare_beside(call.beside.values())
        elif unknown:
            for use in values.uses:
                self._copied(call, use, unknown)
        elif kernel.in_place_view or kernel.namespace != "aten":
            for use in call.values.uses:
                state = use.tracker.state
                length = use.storage.nbytes()
                if length != (use.tracker.size if state is None else state.length):
                    self._storages.resized(use.tracker, length, sample(use.storage))
        if kernel.elementwise or kernel.operator.copies >= 0:
            self._storages.unexplained.pass_on(
                kernel,
                [(use.argument, use.tracker) for use in call.values.uses],
                [(use.argument, use.tracker) for use in values.uses],
            )

    def wrote(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A recorded op wrote its arguments, which is not noted yet."""
        for index in kernel.writes_in(args, kwargs):
            for tensor in tensors_in(kernel.argument(index, args, kwargs)):
                self._wrote(tensor, kernel.writes_all(index))

    def _unknown_in(self, call: OpCall) -> list[TensorUse]:
        """The tensors with unwritten bytes that a call copies."""
        unknown = []
        for use in call.values.uses:
            if use.argument == call.kernel.operator.copies and use.tracker.size == -1:
                region = self._metas.params[use.meta].region(int(offset_of(use.tensor)))
                if not use.tracker.reproducible(region):
                    unknown.append(use)
        return unknown

    def _copied(self, call: OpCall, use: TensorUse, sources: list[TensorUse]) -> None:
        """A call copied tensors with unwritten bytes to this one, which is as unwritten from now on."""
        state = sources[0].tracker.state
        if len(sources) == 1 and state is not None and state.coverage is not None and not use.tracker.alias:
            region = self._metas.params[sources[0].meta].region(int(offset_of(sources[0].tensor)))
            written = state.coverage.written(region) if state.coverage.exact else None
            to = self._metas.params[use.meta].region(int(offset_of(use.tensor)))
            if written is not None and not call.kernel.operator.writes_some and _broadcasts(written.shape, to.sizes):
                self._storages.copied(use.tracker, use.storage, to, written, state)
                return
        coverages = [None if each.tracker.state is None else each.tracker.state.coverage for each in sources]
        touched = call.kernel.operator.writes_some or all(each is None or each.touched for each in coverages)
        self._storages.wrote_anything(use.tracker, use.storage, touched=touched)

    def _wrote(self, tensor: torch.Tensor, everything: bool, places: Places | None = None) -> None:
        storage = storage_of(tensor)
        tracker = self._storages.tracker_of(storage)
        if tracker is not None:
            meta, number = self._view(tracker, tensor, is_zerotensor(tensor))
            self._storages.wrote(tracker, storage, number, meta, int(offset_of(tensor)), everything, places)

    # --------------------------------------------------------------------------------------------------------- digests

    def _digest(self, call: OpCall, values: CallValues, ordinal: int) -> None:
        """Digest every result of the op just recorded, and the tensors that it wrote besides."""
        kernel = call.kernel
        uses = (
            [use for use in values.uses if use.argument not in kernel.opaque_results]
            if not kernel.operator.empty
            else []
        )
        seen = {use.number for use in uses}
        for use in uses:
            self._digest_use(use.tensor, use.argument, ordinal)
        writes = kernel.writes_in(call.args, call.kwargs)
        for use in call.values.uses:
            if use.argument in writes and use.number not in seen:
                self._digest_use(use.tensor, -1, ordinal)

    def _digest_use(self, tensor: torch.Tensor, result: int, ordinal: int) -> None:
        storage = storage_of(tensor)
        tracker = self._storages.tracker_of(storage)
        if tracker is None:
            return
        self._digest_view(
            tracker, storage, self._metas.of(tensor, is_zerotensor(tensor)), int(offset_of(tensor)), result, ordinal
        )

    def _digest_view(
        self, tracker: Tracker, storage: torch.UntypedStorage, meta: int, offset: int, result: int, ordinal: int
    ) -> None:
        if tracker.reproducible(self._metas.params[meta].region(offset)):
            self._digests.record(tracker, storage, [(meta, offset)], ordinal, result)
        elif tracker.state is not None and tracker.state.coverage is not None:
            self._digests.written_ranges(tracker, storage, ordinal)


def _broadcasts(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether elements of these sizes can be copied to a tensor of those."""
    tail = to[len(to) - len(sizes) :]
    return len(sizes) <= len(to) and all(one in (1, other) for one, other in zip(sizes, tail, strict=True))


def _dtype_beside(call: OpCall) -> torch.dtype | None:
    """The dtype for a storage that is itself an argument: `set_` attaches it to a tensor."""
    return next((dtype_of(value) for value in call.args if isinstance(value, torch.Tensor)), None)


def _fills_empty() -> bool:
    """Whether torch fills the memory that `empty` returns with a known value."""
    return torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory()
