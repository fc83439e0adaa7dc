"""Collectives: what talks to other processes of the program.

Each is recorded as a launch, and as a wait where the program waits for it, which holds what arrived
(`pytorch.collectives` says what a replay makes of these). `InFlight` keeps what was launched until then. Waits inside
C++ (DDP's reducer) are not seen: the first use of what arrived, or of what was sent, counts as one. The recorder waits
for nothing itself.

`CollectiveHooks` learns from PyTorch's classes in Python which launch a `Work` or a future is of, and when it is waited
for. Collectives that pass no operator (on a backend itself, by a group written in Python) are `unsupported`, as is one
in flight when the capture begins.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import UNKNOWN_NS
from replayfmt.pytorch import collectives
from replayfmt.pytorch.collectives import (
    Call,
    Group,
    Meaning,
    Numbering,
    describe_group,
    group_of,
    meaning_of,
    ranks_of,
    run_identity,
)
from replayfmt.pytorch.operators import COLLECTIVES
from replayfmt.pytorch.tensors.memory import call_undispatched, make_view, offset_of, storage_of, tensors_in

from .arguments import KnownTensor, TensorUse
from .kernels import CapturedKernel
from .patches import HookHost, Patch, Patched, PatchSet, around
from .storages.trackers import Tracker
from .stream.records import Unrepresentable
from .undispatched import mark_written

_MOST_RANKS = 16
# The places of tensors among the arguments of `opreplay::collective` and `opreplay::collective_wait`.
_INPUTS, _OUTPUTS, _RESULTS = 13, 14, 2


def describe_collective(name: str, args: Iterable[Any]) -> str:
    """The detail of the record of a collective that is not recorded as one: its group, as far as the arguments say."""
    if name.partition("::")[0] not in COLLECTIVES:
        return "it talks to other processes through state that other operators made in all of them"
    group = next((found for value in args if (found := group_of(value)) is not None), None)
    if group is None:
        return "its process group is not known"
    size, ranks = group.size(), ranks_of(group)
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return (
        f"group {group.group_name!r} of {size} {'ranks' if size > 1 else 'rank'} ({shown}), this is rank "
        f"{group.rank()} of it"
    )


class _Output(NamedTuple):
    """A tensor that a collective writes. Its memory is the program's: it is not kept alive."""

    tracker: Tracker
    meta: int
    offset: int  # elements


class Launch:
    """One collective, from just before it begins to the wait for it. `began_ns` is when it began. `done`: it was waited
    for where we can see it."""

    __slots__ = (
        *("__weakref__", "args", "began_ns", "device", "done", "inputs", "kernel", "kwargs", "made", "marked"),
        *("meaning", "outputs", "written"),
    )

    def __init__(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel, self.args, self.kwargs = kernel, args, kwargs
        self.meaning: Meaning | None = None
        self.made: Call | None = None
        self.inputs: list[TensorUse] = []
        self.written: list[TensorUse] = []
        self.outputs: list[_Output] = []
        self.marked: list[int] = []  # storages of which something is in flight
        self.device: torch.device | None = None  # whose streams wait for it
        self.done = False
        self.began_ns = time.perf_counter_ns()


class _OfThread(threading.local):
    """What one thread launches."""

    def __init__(self) -> None:
        self.recent: list[Launch] = []  # of which no Work is known yet
        self.from_python = False  # by a method that returns the Work to Python


class InFlight:
    """The collectives of one CaptureSession. Methods are called with the recorder's lock held, inside attempts."""

    def __init__(self, session: Any, keeps_results: bool) -> None:
        self._session, self._keeps_results = session, keeps_results
        self._launch, self._wait, self._empty = (
            session.calls.kernel_of(func)
            for func in (
                torch.ops.opreplay.collective.default,
                torch.ops.opreplay.collective_wait.default,
                torch.ops.aten.empty_strided.default,
            )
        )
        self._groups: dict[str, Group] = {}
        self._numbering = Numbering()
        self.of_thread = _OfThread()
        self._flying: dict[int, list[tuple[int, int, Launch]]] = {}  # bytes in flight, by storage id
        session.storages.arrived = self._arrived

    # ------------------------------------------------------------------------------------------------------- launching

    def before(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch | Unrepresentable:
        """A collective is about to begin: what it reads enters as it is now."""
        launch = Launch(kernel, args, kwargs)
        if kernel.name.endswith("::wait_tensor"):
            return launch
        given = {each.name: kernel.argument(index, args, kwargs) for index, each in enumerate(kernel.arguments)}
        try:
            launch.meaning = meaning_of(
                kernel.name, {name: value for name, value in given.items() if value is not None}
            )
        except collectives.Unknown as problem:
            about = describe_collective(kernel.name, (*args, *kwargs.values()))
            return Unrepresentable("collective", f"{problem}; {about}")
        unseen = self._session.in_unseen_capture(args, kwargs)
        if unseen is not None:
            return unseen
        parts = launch.meaning.parts
        try:
            launch.inputs = [self._use(_INPUTS, tensor) for tensor in parts.inputs]
            known = {id(use.tensor): use for use in launch.inputs}
            launch.written = [known.get(id(tensor)) or self._use(_OUTPUTS, tensor) for tensor in parts.outputs]
        except Unrepresentable as problem:
            return problem
        launch.began_ns = time.perf_counter_ns()
        return launch

    def _use(self, index: int, tensor: torch.Tensor) -> TensorUse:
        use: TensorUse = self._session.calls.use_of(self._launch, index, tensor)
        return use

    def _number(self, meaning: Meaning) -> Call:
        name = str(meaning.group.group_name)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = describe_group(meaning.group)
        run = "" if self.count else run_identity()
        return self._numbering.call(meaning.operator, group, meaning.reduction, meaning.parts, run)

    @property
    def count(self) -> int:
        """How many were launched."""
        return self._numbering.count

    def after(self, launch: Launch, result: Any) -> None:
        """It was launched, or waited for (`wait_tensor`)."""
        meaning, ended_ns = launch.meaning, time.perf_counter_ns()
        if meaning is None:
            for tensor in tensors_in((*launch.args, *launch.kwargs.values())):
                self._wait_for_tensor(tensor, launch.began_ns, ended_ns)
            return
        made, written = self._number(meaning), launch.written  # one that raised has no number: it met no other
        launch.made = made
        if not meaning.operator.startswith("c10d::"):
            storages = {use.storage._cdata for use in written}
            returned = [tensor for tensor in tensors_in(result) if storage_of(tensor)._cdata not in storages]
            self._produced(returned)
            if meaning.operator.rpartition("::")[2] not in ("isend", "irecv"):
                written += [self._use(_OUTPUTS, tensor) for tensor in returned]
        self._issue_launch(launch, made, ended_ns)
        streams, used = self._session.streams, (*launch.inputs, *written)
        if streams is not None and used and streams.launched(made.work, used[0].storage.device):
            launch.device = used[0].storage.device
        for use in written:
            offset = int(offset_of(use.tensor))
            if self._mark(launch, use.tracker, use.meta, offset):
                launch.outputs.append(_Output(use.tracker, use.meta, offset))
        if not (written or self.of_thread.from_python):  # nothing will arrive that tells of a wait in C++
            for use in launch.inputs:
                self._mark(launch, use.tracker, use.meta, int(offset_of(use.tensor)))
        launch.args, launch.kwargs, launch.meaning, launch.inputs, launch.written = (), {}, None, [], []
        if meaning.operator.endswith("::shard_dim_alltoall"):  # it waits inside
            self.waited([launch], ended_ns, ended_ns)
        else:
            self.of_thread.recent.append(launch)

    def _issue_launch(self, launch: Launch, made: Call, ended_ns: int) -> None:
        inputs, outputs = ([use.number for use in uses] for uses in (launch.inputs, launch.written))
        splits = *made.input_splits, *made.output_splits
        words = (*inputs, *outputs, made.instance, made.peer, made.tag, *splits, made.number, made.work)
        counts = len(made.input_splits), len(made.output_splits), len(inputs), len(outputs)
        constants = made.operator, made.group, made.ranks, made.backend, made.reduction, made.run, *counts
        args = *made, [KnownTensor(number) for number in inputs], [KnownTensor(number) for number in outputs]
        self._session.calls.issued(self._launch, constants, args, words, launch.began_ns, ended_ns)

    def _produced(self, tensors: list[torch.Tensor]) -> None:
        """What a functional collective returns is memory that it allocated."""
        for tensor in tensors:
            if self._session.storages.tracker_of(storage_of(tensor)) is None:
                how = {"dtype": tensor.dtype, "device": tensor.device}
                now = time.perf_counter_ns()
                self._session.ran(self._empty, (list(tensor.shape), list(tensor.stride())), how, tensor, now, now)

    # ----------------------------------------------------------------------------------------------------- in flight

    def _mark(self, launch: Launch, tracker: Tracker, meta: int, offset: int) -> bool:
        """These bytes of a storage are in flight. Returns whether there are any."""
        region = self._session.metas.params[meta].region(offset)
        begin, end = region.start, region.end
        if begin == end:
            return False
        if tracker.state is not None and tracker.state.alias_of is not None:
            delta, tracker = tracker.state.delta, tracker.state.alias_of
            begin, end = begin + delta, end + delta
        self._flying.setdefault(tracker.id, []).append((begin, end, launch))
        launch.marked.append(tracker.id)
        self._session.storages.state(tracker).in_flight = True
        tracker.need_care()
        return True

    def _unmark(self, launch: Launch) -> None:
        while launch.marked:
            number = launch.marked.pop()
            ranges = self._flying.get(number)
            if ranges is None:  # marked twice
                continue
            ranges[:] = [each for each in ranges if each[2] is not launch]
            if not ranges:
                del self._flying[number]
                tracker = self._session.storages.live.get(number)
                if tracker is not None and tracker.state is not None:
                    tracker.state.in_flight = False
                    tracker.settle()

    def being_written(self) -> set[int]:
        """The addresses of storages to which something is about to arrive."""
        numbers = [number for number, ranges in self._flying.items() if any(launch.outputs for _, _, launch in ranges)]
        found = (self._session.storages.live.get(number) for number in numbers)
        storages = (tracker() for tracker in found if tracker is not None)
        return {storage._cdata for storage in storages if storage is not None}

    def _arrived(self, tracker: Tracker, begin: int, end: int) -> None:
        """These bytes of a storage are about to be used: whatever of them was in flight has arrived, or was sent."""
        for first, last, launch in list(self._flying.get(tracker.id, ())):
            if first < end and begin < last:
                self._land(launch)

    def waited(self, launches: Iterable[Launch], began_ns: int, ended_ns: int) -> None:
        """The program waited for these, in this span of perf_counter_ns."""
        for launch in launches:
            if not launch.done:
                launch.done = True
                self._land(launch, began_ns, ended_ns)
                began_ns = ended_ns  # the others had arrived by then

    def _wait_for_tensor(self, tensor: torch.Tensor, began_ns: int, ended_ns: int) -> None:
        tracker = self._session.storages.tracker_of(storage_of(tensor))
        if tracker is not None:
            if tracker.state is not None and tracker.state.alias_of is not None:
                tracker = tracker.state.alias_of
            launches = list(dict.fromkeys(launch for _, _, launch in self._flying.get(tracker.id, ())))
            self.waited(launches, began_ns, ended_ns)

    def _land(self, launch: Launch, began_ns: int | None = None, ended_ns: int = 0) -> None:
        """Record what arrived. `began_ns` and `ended_ns`: of the wait for it, where that was seen."""
        self._unmark(launch)
        made = launch.made
        assert made is not None
        if launch.device is not None:
            self._session.streams.landed(made.work, launch.device)
            launch.device = None
        calls, storages, arrived = self._session.calls, self._session.storages, []
        for tracker, meta, offset in launch.outputs:
            storage, params = tracker(), self._session.metas.params[meta]
            if storage is None or params.region(offset).end > storage.nbytes():
                continue  # its memory is gone, or was made shorter meanwhile
            if tracker.size != storage.nbytes():
                region = params.region(offset)
                tracker = storages.use(tracker, storage, False, self._wait.name, region=region)
            arrived.append((tracker, storage, storages.view(tracker, meta, offset, params.item), meta, offset))
        outputs = [number for _, _, number, _, _ in arrived]
        results = [self._copy(storage, *view) for _, storage, _, *view in arrived] if self._keeps_results else []
        if began_ns is None:
            began_ns = time.perf_counter_ns()
            ended_ns = began_ns + UNKNOWN_NS  # its duration
        constants, words = (len(outputs), len(results)), (*outputs, *results, made.work)
        args = made.work, [KnownTensor(number) for number in outputs], [KnownTensor(number) for number in results]
        calls.issued(self._wait, constants, args, words, max(began_ns, self._session.started), ended_ns)
        for each in arrived:
            calls.arrived(*each)

    def _copy(self, storage: torch.UntypedStorage, meta: int, offset: int) -> int:
        """The tensor id of a copy of what arrived."""
        embedded = self._session.storages.embed_copy(storage, meta, offset)
        if embedded is not None:
            return embedded
        params = self._session.metas.params[meta]
        view = storage, params.dtype, params.sizes, params.strides, offset, params.flags
        copy = call_undispatched(lambda: make_view(*view).clone())
        return self._session.calls.use_of(self._wait, _RESULTS, copy).number


CollectiveFunction = Callable[..., Any]

_MODULE = "torch._C._distributed_c10d"
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_WAITS = ("wait", "synchronize", "result", "is_completed", "block_current_stream")
_EARLIER = (
    "a collective that was launched before the capture began is waited for in it: what it writes, and when, is not "
    "recorded. Begin the capture where no collective is in flight"
)


class CollectiveHooks(Patched):
    """The hooks of one capture, a CaptureSession."""

    def __init__(self, recorder: HookHost, session: Any) -> None:
        self._recorder, self._session = recorder, session
        self._launches: weakref.WeakKeyDictionary[Any, list[Launch]] = weakref.WeakKeyDictionary()  # by Work or future
        self._coalescing = threading.local()
        self._replaced: list[
            tuple[type, str, CollectiveFunction, CollectiveFunction]
        ] = []  # methods of groups that are written in Python
        patches = []
        if torch.distributed.is_available():
            module = torch._C._distributed_c10d
            for owner, names, hook in (
                (module.Backend, _METHODS, self._direct),
                (module.ProcessGroup, (*_METHODS, "_end_coalescing"), self._launching),
                (module.ProcessGroup, ("_start_coalescing",), self._starting),
                (module.Work, _WAITS, self._waiting),
                (module.Work, ("get_future",), self._continuing),
                (module.Reducer, ("_rebuild_buckets",), self._filling),
                (torch._C.Future, ("wait", "value"), self._waiting),
                (torch._C.Future, ("then", "add_done_callback"), self._continuing),
            ):
                place = _MODULE if owner.__module__ != "torch" else "torch._C"
                patches += [
                    Patch(place, f"{owner.__name__}.{name}", around(hook)) for name in names if name in vars(owner)
                ]
            patches.append(Patch(_MODULE, "ProcessGroup.__init__", around(self._made)))
            patches.append(Patch("torch.distributed", "_verify_params_across_processes", around(self._filling)))
        self._patches = PatchSet(patches)

    def install(self) -> None:
        self._patches.install()
        if torch.distributed.is_available():
            for group in _below(torch._C._distributed_c10d.ProcessGroup):
                self._recorder.attempt(self._replace, group)

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
        while self._replaced:
            group, name, original, replacement = self._replaced.pop()
            if vars(group).get(name) is replacement:
                setattr(group, name, original)

    def _made(self, original: CollectiveFunction, group: Any, *args: Any, **kwargs: Any) -> None:
        """A group of a class that may have been written since the capture began."""
        original(group, *args, **kwargs)
        self._recorder.attempt(self._replace_of, type(group))

    def _replace_of(self, group: type) -> None:
        below = set(_below(torch._C._distributed_c10d.ProcessGroup))
        for each in group.__mro__:
            if each in below:
                self._replace(each)

    def _replace(self, group: type) -> None:
        done = {replacement for _group, _name, _original, replacement in self._replaced}
        for name in _METHODS:
            original = vars(group).get(name)
            if callable(original) and original not in done:
                replacement = around(self._direct)(original)
                setattr(group, name, replacement)
                self._replaced.append((group, name, original, replacement))

    def _direct(self, original: CollectiveFunction, group: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if not recorder.launching():
            return original(group, *args, **kwargs)
        recorder.attempt(self._tell_direct, group, original)
        recorder.attempt(mark_written, recorder, (args, kwargs))
        with recorder.paused():
            work = original(group, *args, **kwargs)
        recorder.attempt(mark_written, recorder, (args, kwargs))
        return work

    def _tell_direct(self, group: Any, original: CollectiveFunction) -> None:
        detail = (
            f"a collective on {type(group).__name__} itself, rank {group.rank()} of {group.size()}, passes no "
            "operator, and is not recorded as one"
        )
        self._recorder.unsupported("collective", f"{type(group).__name__}.{original.__name__}", detail)

    def _launching(self, original: CollectiveFunction, group: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a group: the Work that it returns is of what was launched in it."""
        mine = self._recorder.attempt(self._begin)
        try:
            work = original(group, *args, **kwargs)
        finally:
            if mine is not None:
                mine.from_python = False
        if mine is not None:
            self._recorder.attempt(self._launched, work, original.__name__ == "_end_coalescing")
        return work

    def _begin(self) -> _OfThread:
        mine: _OfThread = self._session.collectives.of_thread
        mine.recent.clear()  # launched by C++ code
        mine.from_python = True
        return mine

    def _launched(self, work: Any, ends: bool) -> None:
        recent = self._session.collectives.of_thread.recent
        together: list[Launch] | None = getattr(self._coalescing, "launches", None)
        if together is not None:
            together += recent
        found = together if ends else list(recent)
        if found and work is not None:
            self._launches[work] = found
        if ends:
            self._coalescing.launches = None
        recent.clear()

    def _filling(self, original: CollectiveFunction, /, *args: Any, **kwargs: Any) -> Any:
        """A function of DDP's in C++ that fills host memory through addresses, and copies it to the device."""
        self._session.unwritten_reads += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._session.unwritten_reads -= 1

    def _starting(self, original: CollectiveFunction, group: Any, *args: Any, **kwargs: Any) -> Any:
        self._coalescing.launches = []
        return original(group, *args, **kwargs)

    def _waiting(self, original: CollectiveFunction, work: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a Work or a future: once it has returned (of `is_completed`: True), what was launched is done."""
        began_ns = time.perf_counter_ns()
        results = original(work, *args, **kwargs)
        if (original.__name__ != "is_completed" or results) and self._recorder.launching():
            self._recorder.attempt(self._waited, work, original.__name__, began_ns)
        return results

    def _waited(self, work: Any, name: str, began_ns: int) -> None:
        launches, ended_ns = self._launches.get(work), time.perf_counter_ns()
        session = self._session
        with session.lock:
            if launches is not None:
                session.collectives.waited(launches, began_ns, ended_ns)
            elif not (
                isinstance(work, torch._C.Future) or session.collectives.count or session.records.told("collective")
            ):
                session.records.unsupported("collective", f"Work.{name}", _EARLIER)

    def _continuing(self, original: CollectiveFunction, work: Any, *args: Any, **kwargs: Any) -> Any:
        """A method that returns a future of the same launch, or calls something once it is done."""
        recorder = self._recorder
        launches = recorder.attempt(self._launches.get, work)
        if args and callable(args[0]):
            callback = self._after_wait(args[0], launches) if launches else args[0]
            args = (recorder.in_any_thread(callback), *args[1:])
        future = original(work, *args, **kwargs)
        if launches and future is not None:
            self._launches[future] = launches
        elif not launches and original.__name__ == "get_future" and recorder.launching():
            recorder.attempt(self._waited, work, original.__name__, time.perf_counter_ns())
        return future

    def _after_wait(self, callback: CollectiveFunction, launches: list[Launch]) -> CollectiveFunction:
        @functools.wraps(callback)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.launching():
                self._recorder.attempt(self._arrived, launches)
            return callback(*args, **kwargs)

        return call

    def _arrived(self, launches: list[Launch]) -> None:
        now = time.perf_counter_ns()
        with self._session.lock:
            self._session.collectives.waited(launches, now, now)


def _below(group: type) -> Iterator[type]:
    subclasses: list[type] = group.__subclasses__()
    for each in subclasses:
        yield each
        yield from _below(each)
