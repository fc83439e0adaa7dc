"""Which replacement is used for which calls of a capture: requests resolved against its kernels; conflicts are refused.

Decided once, when a plan is made: by kernel if a selector covers whole kernels, by key (constant part and metadata of
the arguments) if it is a signature, by ordinal if numbers or a callback decide per call.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from replayfmt.errors import SubstitutionFailed, UsageError, first_line
from replayfmt.format.attachments import only_inside
from replayfmt.format.codes import KernelKind, OpStatus, RecordKind
from replayfmt.format.model import Kernel, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import Key, KeyedOps, SignatureIndex
from replayfmt.format.validation import items_of, some_of

from ..planning.devices import DeviceMap
from ..planning.kernels import CallSite, KernelStandIn, ResolvedKernel
from ..planning.records import describe
from ..planning.scan import Scan
from ..results import ReplayResult
from .configurations import FASTEST, ConfigurationChoice, Retuned, retuned
from .configurations import FLAG as AUTOTUNE_AGAIN
from .loading import (
    Library,
    Replacement,
    Selector,
    Substitution,
    SubstitutionRequest,
    check_binding,
    load,
    parse_request,
    replacement_of,
    schema_signature,
)

_SHOWN = 8
_BODY_TOO = "opreplay-dump --attachment=ID writes a graph's body, a capture in which it can be"
# Formats of what is launched in place of a Triton kernel, in words.
_STANDS_FOR_TRITON = {"triton": "functions of Triton", "cubin": "binaries"}


@dataclass(frozen=True)
class KernelCall:
    """A call that a callback decides about. `device` is where the replay runs it, `kernel` is `aten::mm.default`."""

    ordinal: int
    device: torch.device
    kernel: str
    signature: str


# Returns the function to run instead of a call, None for the original.
Decide = Callable[[KernelCall], Callable[..., Any] | None]
SubstitutionChoice = Sequence[str | Substitution] | Decide
AutotuneMode = Literal["captured", "again"]
AUTOTUNE_MODES: tuple[AutotuneMode, ...] = ("captured", "again")


class PreparationProtocol(Protocol):
    """What substitutions need of the preparation of their plan."""

    @property
    def calls_inside_graphs(self) -> Mapping[str, Sequence[str]]: ...

    def scan(self, *, checks: bool) -> Scan: ...


class PlanProtocol(Protocol):
    """What substitutions need of their plan, which is made of them."""

    reader: CaptureReader
    device_map: DeviceMap

    @property
    def kernels(self) -> Sequence[ResolvedKernel | str | None]: ...

    @property
    def preparation(self) -> PreparationProtocol: ...

    @property
    def generators(self) -> Sequence[torch.Generator | None]: ...

    def run_with(
        self, stand_in: KernelStandIn | None, on_progress: Callable[[int], None] | None = None
    ) -> ReplayResult: ...


@dataclass(frozen=True)
class LoadedRequests:
    """The requests, with their files loaded; `decide` is the callback, if one decides."""

    requests: tuple[tuple[SubstitutionRequest, Library | None], ...] = ()
    decide: Decide | None = None

    def __bool__(self) -> bool:
        return bool(self.requests) or self.decide is not None


def load_requests(asked: SubstitutionChoice) -> LoadedRequests:
    """Parse and load the requests. Raises UsageError."""
    if callable(asked):
        return LoadedRequests(decide=asked)
    if isinstance(asked, str):
        raise UsageError(f"substitutions={asked!r}: expected a list of them, or a function that decides")
    requests = []
    for each in items_of("substitutions", asked, "a list of them, or a function that decides"):
        if not isinstance(each, str | Substitution):
            raise UsageError(
                f"substitutions: {type(each).__name__} is not one; expected Substitution(selector, function) "
                "or a text as on the command line"
            )
        requests.append(each.request() if isinstance(each, Substitution) else parse_request(each))
    if len(requests) > 1:
        for request in requests:
            if request.selector.everything:
                raise UsageError(
                    f"{request.told}: all must be the only selector; it was given with {len(requests) - 1} other(s)"
                )
    seen: dict[str, SubstitutionRequest] = {}
    for request in requests:
        known = seen.setdefault(request.selector.text, request)
        if known is not request:
            raise UsageError(
                f"{request.told}: the selector {request.selector.text!r} is repeated; {known.told} has it already"
            )
    return LoadedRequests(
        tuple((request, None if request.function is not None else load(request)) for request in requests)
    )


def _never(*_args: Any, **_kwargs: Any) -> None:
    """Stands for a kernel where the original is not available, so that nothing is replayed."""
    raise AssertionError


class Substitutions(KernelStandIn):
    """The substituted calls of a plan's capture, each replaced in a replay. `index` knows its signatures; `replaced`
    says what replaces which kernel, for people."""

    def __init__(self, plan: PlanProtocol, loaded: LoadedRequests, *, retune: bool = False) -> None:
        """Raises UsageError, and ReplayRefused if `retune` asks for configurations that the capture does not have."""
        self.reader = reader = plan.reader
        self.index = SignatureIndex(reader)
        self.replaced: dict[str, list[str]] = {}
        self._plan = plan
        self._inside_graphs = plan.preparation.calls_inside_graphs
        ops = plan.preparation.scan(checks=False).occurring(RecordKind.op)
        self._called = {signature.kernel for _number, signature in ops if signature.status is OpStatus.ok}
        self._by_kernel: dict[int, Replacement] = {}
        self._by_key: dict[Key, Replacement] = {}
        self._by_ordinal: dict[int, Replacement] = {}
        # Who has a kernel, a key of its calls, or one call; and who was the first to have a part of one of these.
        self._whole: dict[Hashable, SubstitutionRequest] = {}
        self._part: dict[Hashable, SubstitutionRequest] = {}
        self._kernel_of = [0 if signature is None else signature.kernel for signature in reader.signatures]
        for request, library in loaded.requests:
            self._add(request, library)
        if loaded.decide is not None:
            if retune:
                raise UsageError("autotune='again' and a function that decides on substitutions: give one of the two")
            self._ask(loaded.decide)
        self._retuned = self._retune() if retune else {}

    def find(self, signature_id: int, metas: tuple[int, ...], ordinal: int) -> Replacement | None:
        """The replacement for a call, None if there is none."""
        found = self._by_kernel.get(self._kernel_of[signature_id])
        if found is None and self._by_key:
            found = self._by_key.get((signature_id, metas))
        if found is None and self._by_ordinal:
            found = self._by_ordinal.get(ordinal)
        return found

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = self.find(site.signature_id, site.metas, site.ordinal)
        if replacement is None:
            return None
        wrapped = site.wrap(replacement.call)
        # Wrappers of custom operators are made for each site: they may depend on settings that change during the
        # replay.
        return (("replacement", replacement.call) if wrapped is replacement.call else None), wrapped

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        frame = self.reader.frame(self.reader.frame_of(ordinal))
        row = ordinal - frame.first_ordinal
        number = int(frame.signature[row])
        signature = self.reader.signatures[number]
        if signature is None or signature.kind is not RecordKind.op or signature.status is not OpStatus.ok:
            return None
        first = int(frame.tensor_first[row])
        slots = frame.tensor_slots[first : first + self.index.argument_tensors(number)]
        replacement = self.find(number, tuple(frame.tensor_meta[slots].tolist()), ordinal)
        return None if replacement is None else self.failed(ordinal, replacement, error)

    def failed(self, ordinal: int, replacement: Replacement, error: BaseException) -> SubstitutionFailed:
        what, scope = describe(self.reader, ordinal)
        inside = f", scope {scope}" if scope else ""
        return SubstitutionFailed(
            f"{self.reader.path}: ordinal {ordinal} ({what}{inside}): the replacement {replacement.label} failed at "
            f"{replacement.place_of(error)}: {type(error).__name__}: {first_line(error)}",
            replacement.traceback_of(error),
        )

    @property
    def reason(self) -> str:
        """Why results may differ from the captured ones bit for bit."""
        what = [f"{kernel} by {', '.join(labels)}" for kernel, labels in self.replaced.items()]
        return f"kernels are substituted: {some_of(what, _SHOWN)}" if what else "nothing is substituted"

    @property
    def choices(self) -> tuple[ConfigurationChoice, ...]:
        """The configurations that were chosen for launches so far."""
        return tuple(choice for each in self._retuned.values() for choice in each.choices)

    def left_as_captured(self) -> list[str]:
        """A sentence on the Triton kernels whose configuration was not chosen again."""
        if not self._retuned:
            return []
        left = [
            self._kernel(number).qualified_name
            for number in sorted(self._called - set(self._retuned))
            if self._kernel(number).kind is KernelKind.triton
        ]
        why = "no autotuner chose their configuration while they were captured"
        return [f"{AUTOTUNE_AGAIN} leaves {some_of(left, _SHOWN)} as captured: {why}"] if left else []

    def _retune(self) -> dict[int, Retuned]:
        """Have autotuned kernels launched in the configuration that is fastest here."""
        ordinals: dict[int, list[int]] = {}
        triton = {n for n in self._called if self._kernel(n).kind is KernelKind.triton}
        for ops in self.index.ops_by_key(triton):
            if self.reader.signatures[ops.key[0]].status is OpStatus.ok:
                ordinals.setdefault(ops.kernel, []).extend(ops.ordinals.tolist())
        found = retuned(self.reader, self._plan.kernels, ordinals)
        for number, each in found.items():
            request = SubstitutionRequest(Selector(self._kernel(number).qualified_name), AUTOTUNE_AGAIN)
            self._claim(request, number)
            replacement = Replacement(each, FASTEST, "", 0, None)
            self._check(request.told, number, replacement)
            self._by_kernel[number] = replacement
        return found

    def left_inside_graphs(self) -> tuple[str, ...]:
        """A sentence for each kernel that is replaced, and not where graphs call it."""
        return tuple(
            f"{name} is substituted, but not inside of {some_of(graphs, _SHOWN)}: {_BODY_TOO}"
            for name in self.replaced
            if (graphs := self._inside_graphs.get(name))
        )

    def _add(self, request: SubstitutionRequest, library: Library | None) -> None:
        selector = request.selector
        if selector.signature is not None:
            self._add_signature(request, library)
            return
        if selector.everything:
            chosen = self._offered(request, library)
        else:
            numbers = self._selected(request)
            chosen = [(number, self._replacement(request, library, number)) for number in numbers]
        for number, replacement in chosen:
            self._claim(request, number)
            self._check(request.told, number, replacement)
            self._by_kernel[number] = replacement

    def _kernel(self, number: int) -> Kernel:
        return self.reader.kernels[number]

    def _selected(self, request: SubstitutionRequest) -> list[int]:
        """The kernels that an id or an operator's name selects."""
        kernels = self.reader.kernels
        selector = request.selector
        if selector.kernel_id is not None:
            if selector.kernel_id >= len(kernels):
                raise UsageError(
                    f"{request.told}: {self.reader.path} has the kernels 1 to {len(kernels) - 1}, no "
                    f"kernel {selector.kernel_id}"
                )
            if selector.kernel_id not in self._called:
                self._nothing(request)
            return [selector.kernel_id]
        numbers = [
            number
            for number in sorted(self._called)
            if selector.operator in (self._kernel(number).name, self._kernel(number).qualified_name)
        ]
        if not numbers:
            self._nothing(request)
        return numbers

    def _nothing(self, request: SubstitutionRequest) -> None:
        selector = request.selector
        names = {self._kernel(number).qualified_name for number in self._called}
        names |= {self._kernel(number).name for number in self._called}
        wanted = selector.signature.kernel if selector.signature is not None else selector.operator or ""
        if selector.signature is not None and wanted in names:
            numbers = [number for number in self._called if self._kernel(number).qualified_name == wanted]
            texts = [group.text for group in self.index.groups(numbers)]
            hint = f"its signatures there are {some_of(texts, _SHOWN, separator='; ')}"
        else:
            close = difflib.get_close_matches(wanted, sorted(names), 3)
            if graphs := self._inside_graphs.get(wanted):
                raise UsageError(
                    f"{request.told}: {wanted} is called only inside {some_of(graphs, _SHOWN)}: {_BODY_TOO}"
                )
            hint = f"did you mean {' or '.join(close)}?" if close else "opreplay-dump --signatures prints what it calls"
        raise UsageError(f"{request.told}: {selector.text!r} matches no call of {self.reader.path}; {hint}")

    def _offered(self, request: SubstitutionRequest, library: Library | None) -> list[tuple[int, Replacement]]:
        """The meaning of `all`: every called kernel for which the file has a function."""
        if library is None:
            raise UsageError(f"{request.told}: all takes a file that has functions by operator name, not one function")
        if request.format in _STANDS_FOR_TRITON:
            what = _STANDS_FOR_TRITON[request.format]
            raise UsageError(f"{request.told}: all does not take {what}: name the kernel that one replaces")
        if request.name:
            raise UsageError(f"{request.told}: all takes no name: the file's functions have the operators' names")
        found = [(number, library.offer(self._kernel(number))) for number in sorted(self._called)]
        chosen = [(number, replacement) for number, replacement in found if replacement is not None]
        if not chosen:
            exported = library.exported()
            inside = only_inside(self.reader, lambda name: name.rpartition("::")[2] in exported)
            raise UsageError(
                f"{request.told}: {request.path} has no function with the name of an operator that "
                f"{self.reader.path} calls; it has {', '.join(exported) or 'no functions'}"
                + (f"; {inside}" if inside else "")
            )
        return chosen

    def _replacement(self, request: SubstitutionRequest, library: Library | None, number: int) -> Replacement:
        if request.function is not None:
            return replacement_of(request.function, request.name)
        assert library is not None
        kernel = self._kernel(number)
        resolved = self._plan.kernels[number]
        if request.format == "cubin":
            label = library.label + (f":{request.name}" if request.name else "")
            found = Replacement(_never, label, "", 0, None)
        else:
            found = library.find(request.name or kernel.name.rpartition("::")[2], request.told)
        if request.format not in _STANDS_FOR_TRITON or not isinstance(resolved, ResolvedKernel):
            return found
        try:
            launched = (
                resolved.with_binary(library.cubin(request.name))
                if request.format == "cubin"
                else resolved.with_function(found.call)
            )
        except ValueError as error:
            what = f"{found.label} cannot stand for {kernel.qualified_name}"
            raise UsageError(f"{request.told}: {what}: {error}") from None
        return replace(found, call=launched.call, signature=schema_signature(launched.schema))

    def _check(self, told: str, number: int, replacement: Replacement) -> None:
        kernel = self._kernel(number)
        resolved = self._plan.kernels[number]
        if isinstance(resolved, ResolvedKernel):  # without it the plan is refused: the original is needed to judge by
            what = f"{told}: {replacement.label} cannot stand for {kernel.qualified_name}"
            check_binding(replacement.signature, resolved.schema, what)
        labels = self.replaced.setdefault(kernel.qualified_name, [])
        if replacement.label not in labels:
            labels.append(replacement.label)

    def _claim(
        self, request: SubstitutionRequest, kernel: int, ops: KeyedOps | None = None, ordinal: int | None = None
    ) -> None:
        """Give a request a kernel, or the calls of a key, or one of these. Raises UsageError where another request has
        it, a part of it, or what it is in."""
        units: list[Hashable] = [("kernel", kernel)]
        units += [] if ops is None else [ops.key]
        units += [] if ordinal is None else [ordinal]
        others = [self._part.get(units[-1]), *map(self._whole.get, units)]
        other = next((other for other in others if other is not None and other is not request), None)
        if other is not None:
            called = self._kernel(kernel).qualified_name
            what = called if ops is None else self.index.text(ops.key, int(ops.ordinals[0]))
            raise UsageError(
                f"{request.told}: overlaps with {other.told}: both select calls of {what}; which one should "
                "they get? Narrow one of them"
            )
        self._whole[units[-1]] = request
        for unit in units[:-1]:
            self._part.setdefault(unit, request)

    def _add_signature(self, request: SubstitutionRequest, library: Library | None) -> None:
        pattern = request.selector.signature
        assert pattern is not None
        replacement: Replacement | None = None
        for ops in self.index.matching(pattern):
            if self.reader.signatures[ops.key[0]].status is not OpStatus.ok:
                continue
            for ordinal in ops.ordinals.tolist() if pattern.asks_for_values else [None]:
                self._claim(request, ops.kernel, ops, ordinal)
            if replacement is None:
                replacement = self._replacement(request, library, ops.kernel)
                self._check(request.told, ops.kernel, replacement)
            if pattern.asks_for_values:
                self._by_ordinal.update(dict.fromkeys(ops.ordinals.tolist(), replacement))
            else:
                self._by_key[ops.key] = replacement
        if replacement is None:
            self._nothing(request)

    def _ask(self, decide: Decide) -> None:
        """Ask the callback about every call once, in capture order."""
        groups = [
            ops
            for ops in self.index.ops_by_key(self._called)
            if self.reader.signatures[ops.key[0]].status is OpStatus.ok
        ]
        if not groups:
            return
        ordinals = np.concatenate([ops.ordinals for ops in groups])
        which = np.repeat(np.arange(len(groups)), [len(ops.ordinals) for ops in groups])
        devices: dict[Key, torch.device] = {}
        made: dict[tuple[int, int], Replacement] = {}
        for position in np.argsort(ordinals).tolist():
            ops, ordinal = groups[int(which[position])], int(ordinals[position])
            if ops.key not in devices:
                devices[ops.key] = self._device(ordinal)
            kernel, text = self._kernel(ops.kernel), self.index.text(ops.key, ordinal)
            function = decide(KernelCall(ordinal, devices[ops.key], kernel.qualified_name, text))
            if function is None:
                continue
            if not callable(function):
                raise UsageError(
                    f"substitutions: the callback returned a {type(function).__name__} for ordinal {ordinal} "
                    f"({text}); expected a function, or None for the original"
                )
            key = (ops.kernel, id(function))
            if key not in made:
                made[key] = replacement_of(function, str(getattr(function, "__name__", "function")))
                self._check("substitutions", ops.kernel, made[key])
            self._by_ordinal[ordinal] = made[key]

    def _device(self, ordinal: int) -> torch.device:
        """The device of an op's first result, else of its first argument, else the CPU."""
        record = self.reader.record(ordinal)
        for value in (*record.results, *record.args):
            values = value if isinstance(value, list | tuple) else [value]
            for each in values:
                if isinstance(each, TensorValue):
                    return self._plan.device_map.target(each.meta.device)
        return torch.device("cpu")
