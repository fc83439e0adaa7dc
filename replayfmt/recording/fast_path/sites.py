"""The fast path: calls that were seen before are recorded by code made for them.

A site is one operator called with one set of constants and tensor metadata. Which site comes next is guessed from the
one before: programs repeat themselves, layer by layer and step by step. A guess costs one C++ comparison of all
tensors, and a wrong one nothing else: the call takes the complete path in calls.py. Sites are made at the second call
of their kind.

The comparison does not see the lazy conjugate and negative bits, because inside a dispatch mode PyTorch masks them. The
former is looked at for complex tensors; the latter for views that cover a part of an imported storage, and otherwise
recording gives up the fast path when it meets the first negative view: an op must have made it.

What an op's results look like also depends on global settings (the default dtype, say), so each state of the settings
has sites of its own.

Only plain calls have sites: strided tensors and lists of them, plain constants, results that are new storages, views of
arguments or arguments written in place. Everything else (random ops, out= arguments, empty memory) always takes the
complete path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import RLock, get_ident
from typing import Any, Protocol

import torch

from replayfmt.format.codes import ValueKind
from replayfmt.pytorch.tensors.looks import is_zerotensor

from ..dispatch.call import CallValues, OpCall, TensorUse
from ..dispatch.kernels import CapturedKernel
from ..interrupts import is_interrupt
from ..options import CaptureOptions
from ..state.numeric_state import NumericState, Poll
from ..storages.identity import Storages
from ..storages.trackers import Tracker
from ..stream.buffer import FROM_SITE, MadeView, RecordBuffer, packer
from ..stream.records import Records
from ..stream.scopes import Scopes
from ..stream.tensor_metas import TensorMetas
from .templates import (
    COMPLEX,
    CONJUGATED,
    CONSTANT,
    NEW,
    NOTHING,
    NUMBER,
    SAME,
    TENSOR,
    TENSORS,
    VIEW,
    ZERO,
    CallShape,
    Factory,
    Place,
)

# None where this build compares tensors otherwise: then every call takes the complete path.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Following = dict[int, "Site"]

_CANDIDATES = 16  # sites of one operator that are tried where the guess was wrong
_LIMIT = 20_000  # sites of a capture
_AFTER_OTHERS = 4096  # places of operators without a site that are told apart; those met later only by the operator
_TENSORS = 400  # arguments of a call that has a site
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes that answer for themselves what is asked of a tensor
_SIMPLE = {
    ValueKind.none,
    ValueKind.bool,
    ValueKind.int,
    ValueKind.float,
    ValueKind.string,
    ValueKind.dtype,
    ValueKind.layout,
    ValueKind.memory_format,
    ValueKind.device,
    ValueKind.tensor,
    ValueKind.list,
}


class Site:
    """One kind of call: what runs it, what followed it, which settings it depends on."""

    __slots__ = ("following", "polls", "run")

    def __init__(self, run: Run, polls: Poll | None) -> None:
        self.run = run
        self.polls = polls
        self.following: Following = {}


class _State:
    """The sites of one state of the settings."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Site | None] = {}
        self.candidates: dict[int, list[Site]] = {}
        self.after_other: dict[tuple[int, int], Following] = {}


class SitesCapture(Protocol):
    """What sites need of the capture that they are of: its parts, and what to do where a call is not as it was."""

    options: CaptureOptions
    lock: RLock
    threads: list[int]
    ended: list[bool]
    buffer: RecordBuffer
    records: Records
    scopes: Scopes
    storages: Storages
    metas: TensorMetas
    numeric: NumericState

    def enter(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Tracker: ...

    def view(self, tracker: Tracker, meta: int, offset: int) -> int: ...

    def late(self, kernel: CapturedKernel, args: Any, kwargs: Any, result: Any, started: int, ended: int) -> Any: ...

    def late_raised(self, kernel: CapturedKernel, args: Any, kwargs: Any, started: int, ended: int) -> None: ...

    def interrupted(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def failed(self, error: BaseException) -> bool: ...


class Sites:
    """The sites of one capture. `state` changes with the settings."""

    def __init__(self, core: SitesCapture) -> None:
        self._core = core
        self._seen: set[int] = set()
        self._count = 0
        self._states: dict[tuple[Any, ...], _State] = {}
        self.state = _State()
        self.settings_changed()
        core.numeric.changed = self.settings_changed
        buffer, storages = core.buffer, core.storages
        self._factory = Factory(
            {
                "clock": time.perf_counter_ns,
                "begin": core.records.started,
                "contexts": core.scopes.contexts,
                "ident": get_ident,
                "rows": buffer.rows.append,
                "threads": core.threads,
                "ended": core.ended,
                "lock": core.lock,
                "next_storage": buffer.next_storage.__next__,
                "next_tensor": buffer.next_tensor.__next__,
                "Tracker": Tracker,
                "tell_death": storages.dead.append,
                "live": storages.live,
                "enter": core.enter,
                "view": core.view,
                "finish": core.late,
                "raised": core.late_raised,
                "interrupt": is_interrupt,
                "has_function": torch._C._has_torch_function_variadic,
                "interrupted": core.interrupted,
                "failed": core.failed,
                "same_settings": core.numeric.check,
            }
        )
        self.enabled = TensorGuards is not None and not core.options.audit and core.options.digests != "ops"

    def settings_changed(self) -> None:
        """The stream has stated other settings than before."""
        self.state = self._states.setdefault(tuple(self._core.numeric.stated.items()), _State())

    def following(self, last: Following, func_id: int) -> Following:
        """What followed an operator that has no site, where `last` is what followed the last site before it."""
        known = self.state.after_other
        key = (id(last), func_id)
        if key not in known and len(known) >= _AFTER_OTHERS:
            key = (0, func_id)
        return known.setdefault(key, {})

    def learn(self, signature: int, call: OpCall, results: CallValues, result: Any) -> Site | None:
        """A call took the complete path. Gives its site, made where this is the second call of its kind."""
        if not self.enabled or call.values.addresses or results.addresses:
            return None
        key = (
            signature,
            *(use.meta for use in call.values.uses),
            *(use.meta for use in results.uses),
            *(use.storage.nbytes() for use in call.values.uses),
            *call.values.ints,
            *call.values.floats,
        )
        state = self.state
        if key in state.made:
            return state.made[key]
        sight = hash((id(state), key))
        if sight not in self._seen:
            if len(self._seen) < _LIMIT * 8:
                self._seen.add(sight)
            return None
        if self._count >= _LIMIT:
            return None
        self._count += 1
        site = state.made[key] = self._make(signature, call, results, result)
        if site is not None:
            candidates = state.candidates.setdefault(id(call.kernel.func), [])
            candidates.insert(0, site)
            del candidates[_CANDIDATES:]
        return site

    def _make(self, signature: int, call: OpCall, results: CallValues, result: Any) -> Site | None:
        kernel, core = call.kernel, self._core
        if (
            kernel.operator.empty
            or kernel.draws(call.args, call.kwargs)
            or kernel.opaque_results
            or kernel.in_place_view
            or kernel.mixed_lists
            or kernel.namespace == "fsdp"
        ):
            return None
        if any(token.kind not in _SIMPLE for token in (*call.values.key, *results.key)):
            return None
        uses = (*call.values.uses, *results.uses)
        if results.ints or results.floats or any(use.tracker.size < 0 or is_zerotensor(use.tensor) for use in uses):
            return None
        if not all(type(use.tensor) in _PLAIN for use in uses):
            return None
        if core.options.payload == "integers" and kernel.view and len({use.tensor.dtype for use in uses}) > 1:
            return None  # content that was left out as floats may have to be recorded as integers now
        arguments = _arguments(call.args)
        keywords = [Place(f"q_{name}", _constant_kind(value) or "") for name, value in call.kwargs.items()]
        if arguments is None or not all(place.kind for place in keywords):
            return None
        returned = () if kernel.results == 0 else (result,) if kernel.results == 1 else tuple(result)
        given = dict(zip(_names(arguments), _flat(call.args), strict=True))
        arguments = self._filled(arguments, call.values.uses)
        places = self._results(returned, given, results.uses)
        if places is None or len(given) > _TENSORS or not _writes_are_plain(kernel, arguments, places):
            return None
        written = [p.other or p.name for i in kernel.writes for p in arguments[i].flat() if p.kind == TENSOR]
        shape = CallShape(
            arguments,
            tuple(keywords),
            places,
            kernel.results == 1,
            tuple(dict.fromkeys(written)),
            _results_follow(kernel),
        )
        own = self._own(signature, call, results, shape)
        return Site(self._factory.make(shape, own), core.numeric.poll_of(kernel.name))

    def _results(
        self, returned: tuple[Any, ...], given: dict[str, Any], uses: list[TensorUse]
    ) -> tuple[Place, ...] | None:
        """The places of the results; None where they are no plain ones."""
        tensors: dict[int, str] = {}
        storages: dict[int, str] = {}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(id(value), name)
                storages.setdefault(value.untyped_storage()._cdata, name)
        remaining = iter(uses)
        places: list[Place] = []
        for index, value in enumerate(returned):
            name = f"r{index}"
            if type(value) is list:
                items = [
                    self._result(f"{name}_{n}", item, tensors, storages, remaining) for n, item in enumerate(value)
                ]
                plain = [item for item in items if item is not None]
                if len(plain) != len(items):
                    return None
                places.append(Place(name, TENSORS, "", tuple(plain)))
            else:
                place = self._result(name, value, tensors, storages, remaining)
                if place is None:
                    return None
                places.append(place)
        return tuple(places)

    def _result(
        self, name: str, value: Any, tensors: dict[int, str], storages: dict[int, str], remaining: Iterator[TensorUse]
    ) -> Place | None:
        if value is None:
            return Place(name, NOTHING)
        if not isinstance(value, torch.Tensor):
            return None
        use = next(remaining)
        if id(value) in tensors:
            return Place(name, SAME, tensors[id(value)])
        number = use.storage._cdata
        if number in storages:
            return Place(name, VIEW, storages[number], full=self._full(use)) if storages[number] else None
        if not self._full(use):
            return None
        storages[number] = ""  # a second result on the same new storage is no plain one
        return Place(name, NEW, full=True)

    def _full(self, use: TensorUse) -> bool:
        """Whether a tensor covers its storage without a hole."""
        region = self._core.metas.params[use.meta].region(int(use.tensor.storage_offset()))
        return region.dense() == (0, use.storage.nbytes())

    def _filled(self, places: tuple[Place, ...], uses: list[TensorUse]) -> tuple[Place, ...]:
        """The places of the arguments, with `full` as their tensors are."""
        remaining = iter(uses)

        def filled(place: Place) -> Place:
            if place.kind != TENSOR:
                return place
            use = next(remaining)
            if place.other:
                return place
            flags = CONJUGATED if use.tensor.is_complex() and use.tensor.is_conj() else ""
            return replace(place, full=self._full(use), flags=COMPLEX + flags if use.tensor.is_complex() else "")

        return tuple(
            replace(top, items=tuple(map(filled, top.items))) if top.kind == TENSORS else filled(top) for top in places
        )

    def _own(self, signature: int, call: OpCall, results: CallValues, shape: CallShape) -> dict[str, Any]:
        core, kernel = self._core, call.kernel
        inputs = list(zip(shape.inputs(), call.values.uses, strict=True))
        outputs = list(zip(shape.outputs(), results.uses, strict=True))
        made = [
            MadeView(len(inputs) + slot, use.meta, use.storage.nbytes() if place.kind == NEW else -1)
            for slot, (place, use) in enumerate(outputs)
            if place.kind != SAME
        ]
        new_on = [use.storage.device for place, use in outputs if place.kind == NEW]
        number = core.buffer.sites.add(
            signature,
            len(inputs) + len(outputs),
            call.values.ints,
            call.values.floats,
            made,
            core.records.device(new_on[0]) if new_on else 0,
        )
        own: dict[str, Any] = {
            "op": kernel.quick,
            "code": FROM_SITE + number,
            "kernel": kernel,
            "pack": packer(len(inputs) + len(outputs) + 2 * len(made), 0),
        }
        for place, value in zip((*shape.arguments, *shape.keywords), (*call.args, *call.kwargs.values()), strict=True):
            if place.kind in (CONSTANT, NUMBER, ZERO):
                own[f"c_{place.name}"] = value
        for place, use in (*inputs, *outputs):
            own[f"m_{place.name}"] = use.meta
            own[f"n_{place.name}"] = use.storage.nbytes()
        own["check"] = _guard([use.tensor for place, use in inputs if not place.other])
        own["check_results"] = _guard([use.tensor for place, use in outputs if place.kind != SAME])
        return own


def _results_follow(kernel: CapturedKernel) -> bool:
    """Whether the metadata of the results depends on the arguments' metadata and constants only. FakeTensor relies on
    the same; operators whose results depend on data are tagged."""
    tags = kernel.func.tags
    return (
        kernel.namespace == "aten"
        and torch.Tag.dynamic_output_shape not in tags
        and (torch.Tag.data_dependent_output not in tags)
    )


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    if not tensors:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is list and any(isinstance(item, torch.Tensor) for item in value):
            yield from value
        else:
            yield value


def _names(places: Iterable[Place]) -> Iterator[str]:
    for top in places:
        for place in top.flat():
            yield place.name


def _arguments(args: tuple[Any, ...]) -> tuple[Place, ...] | None:
    """The places of the arguments; None where they are no plain ones."""
    first: dict[int, str] = {}

    def tensor(name: str, value: Any) -> Place:
        if value is None:
            return Place(name, NOTHING)
        other = first.setdefault(id(value), name)
        return Place(name, TENSOR, "" if other == name else other)

    places = []
    for index, value in enumerate(args):
        name = f"a{index}"
        if isinstance(value, torch.Tensor):
            places.append(tensor(name, value))
        elif type(value) is list and any(isinstance(item, torch.Tensor) for item in value):
            if not all(item is None or isinstance(item, torch.Tensor) for item in value):
                return None
            items = tuple(tensor(f"{name}_{place}", item) for place, item in enumerate(value))
            places.append(Place(name, TENSORS, "", items))
        else:
            kind = _constant_kind(value)
            if kind is None:
                return None
            places.append(Place(name, kind))
    return tuple(places)


def _constant_kind(value: Any) -> str | None:
    """How to compare an argument with its constant; None where it is none."""
    if value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return CONSTANT
    if type(value) is float and value == 0.0:
        return ZERO
    if type(value) in (bool, int, float):
        return NUMBER
    if type(value) is list and (all(type(item) is int for item in value) or all(type(item) is bool for item in value)):
        return CONSTANT
    return None


def _writes_are_plain(kernel: CapturedKernel, arguments: tuple[Place, ...], results: tuple[Place, ...]) -> bool:
    """Whether what is written are positional tensors that come back as they are (so they were not resized)."""
    given_back = {place.other for top in results for place in top.flat() if place.kind == SAME}
    for index in kernel.writes:
        if index >= len(arguments):
            return False
        for place in arguments[index].flat():
            if place.kind == TENSOR and kernel.results and (place.other or place.name) not in given_back:
                return False
    return True
