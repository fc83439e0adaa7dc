"""The substitutions of one plan: resolved against its capture, checked in a separate pass, then used and reported.

In the untimed checked pass both kernels run, and the behaviour of each replacement is reported signature by signature.
Afterwards a replay's code calls the replacements directly. `python_dispatch` gives their code what it may rely on and
captured kernels do not need: PyTorch's Python dispatch, which a replay disables. It is enabled once for a whole run,
with the original kernels as well, so that it adds no cost per call to either.

`guard` is a pass in which each kernel, the captured one or its replacement, is also called on copies of its arguments
between unreadable pages, in a forked process (so not for accelerators); further calls with one unreadable page find the
argument and the side. The replay itself continues with what the original returns.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from replayfmt.errors import GuardViolated, OpReplayError, ReplayMismatch, SubstitutionFailed, SubstitutionRejected
from replayfmt.format.validation import counted
from replayfmt.pytorch import accelerators
from replayfmt.pytorch.accelerators import undrawn
from replayfmt.pytorch.environment import apply_settings, read_settings
from replayfmt.pytorch.guards import Memory, poisoned
from replayfmt.pytorch.tensors.memory import byte_tensor

from ..planning.kernels import CallSite, KernelStandIn
from ..planning.records import describe
from ..run.content import Clones, copy_of, has_memory, strided_parts
from .configurations import ConfigurationChoice
from .distance import Distance, Tolerance, WorstElement
from .judging import CallOutcomes, Judgement, MemoryLabels, Returned, judge
from .loading import Replacement
from .table import LoadedRequests, PlanProtocol, Substitutions


@contextmanager
def python_dispatch() -> Iterator[None]:
    """Enable Python dispatch and `__torch_function__` inside a replay, as a program has them."""
    with (
        _disable_current_modes(),
        torch._C._EnableTorchFunction(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False),
    ):
        yield


_MOST_FAULTS = 5
_NOT_TELLING = "the inputs of all calls have equal elements, on which a wrong kernel can give the right result"


@dataclass
class SignatureCheck:
    """How a replacement behaved in the calls of one signature. `first` is the ordinal of the first call.

    `faults` are sentences about its behaviour (the first few; `fault_count` counts all of them); `beyond` names the
    first call with a value that is too far off, None if there is none; `worst` is the element farthest off in all
    calls, `worst_place` the call's ordinal, and the result or argument. `telling`: whether some call had a tensor whose
    elements differ from each other, or no tensor with several elements; without, a kernel that mixes up rows or reads
    one element everywhere passes, too.
    """

    signature: str
    kernel: str
    replacement: str
    first: int
    calls: int = 0
    telling: bool = False
    distance: Distance = field(default_factory=Distance)
    tolerances: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    beyond: int | None = None
    worst: WorstElement | None = None
    worst_place: tuple[int, str, str] = (0, "", "")  # with the tolerance used

    @property
    def ok(self) -> bool:
        return not self.fault_count and self.beyond is None

    def add(self, ordinal: int, judgement: Judgement) -> None:
        self.calls += 1
        self.distance = self.distance.with_(judgement.distance)
        for each in judgement.compared:
            if each.close not in self.tolerances:
                self.tolerances.append(each.close)
            if each.worst is not None:
                self.beyond = ordinal if self.beyond is None else self.beyond
                if self.worst is None or each.worst.times > self.worst.times:
                    self.worst, self.worst_place = each.worst, (ordinal, each.where, each.close)
        self.fault_count += len(judgement.faults)
        for fault in judgement.faults:
            if len(self.faults) < _MOST_FAULTS and not any(known.endswith(fault) for known in self.faults):
                self.faults.append(f"ordinal {ordinal}: {fault}")

    def sentences(self) -> list[str]:
        """What is wrong, in full sentences; empty if nothing is."""
        about = f"{self.replacement} in place of {self.signature}"
        found = [f"{about}: {fault}" for fault in self.faults]
        if self.beyond is not None:
            ordinal, where, close = self.worst_place
            found.append(
                f"{about}: {self.distance.beyond} of {self.distance.elements} elements are too far off, first "
                f"at ordinal {self.beyond}; the worst at ordinal {ordinal}, {where}: {self.worst}, where "
                f"close is {close}; {distances(self.distance)}"
            )
        return found


def distances(found: Distance) -> str:
    """The largest distances in one line, for people."""
    if not found.elements:
        return "not compared: there are none"
    if not found.different:
        return "equal"
    parts = []
    if found.largest_absolute is not None:
        parts.append(f"absolute {found.largest_absolute:.3g}")
    if found.largest_relative is not None:
        parts.append(f"relative {found.largest_relative:.3g}")
    if found.largest_ulp is not None:
        parts.append(f"{found.largest_ulp} ULP")
    text = f"apart by at most {', '.join(parts)}" if parts else f"{found.different} elements differ"
    return text + (f"; {found.not_finite} elements are not finite on one side alone" if found.not_finite else "")


class Check(KernelStandIn):
    """Replaces every substituted call with a checked call, which reports its replacement's failures itself. `checks`
    has the findings, by signature."""

    def __init__(
        self, table: Substitutions, generators: Sequence[torch.Generator | None], tolerance: Tolerance, poison: bool
    ) -> None:
        """With `poison`, new memory is NaN in calls of replacements."""
        self.table, self.tolerance, self.poison = table, tolerance, poison
        self.checks: dict[tuple[str, str], SignatureCheck] = {}
        unique = dict.fromkeys((*generators, *accelerators.default_generators()))
        self.generators = [generator for generator in unique if generator is not None]
        self.returned = Returned()

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = self.table.find(site.signature_id, site.metas, site.ordinal)
        if replacement is not None and site.once:
            check = self.of(site, replacement)
            check.fault_count += 1
            check.faults.append(
                f"ordinal {site.ordinal}: the original acts on an object that its argument is the "
                "address of; that cannot be done twice, so nothing can be checked against it"
            )
            return None
        return None if replacement is None else (None, _CheckedCall(self, site, replacement))

    @property
    def reason(self) -> str:
        return self.table.reason

    def of(self, site: CallSite, replacement: Replacement) -> SignatureCheck:
        text = self.table.index.text((site.signature_id, site.metas), site.ordinal)
        key = (text, replacement.label)
        if key not in self.checks:
            name, _scope = describe(self.table.reader, site.ordinal)
            self.checks[key] = SignatureCheck(text, name, replacement.label, site.ordinal)
        return self.checks[key]


class _CheckedCall:
    """Called in place of a kernel; one for each op."""

    def __init__(self, check: Check, site: CallSite, replacement: Replacement) -> None:
        self._check, self._site, self._replacement = check, site, replacement
        self._call = site.wrap(replacement.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check, site = self._check, self._site
        found = check.of(site, self._replacement)
        clones, again = Clones(), Clones()
        copied_args, copied_kwargs = clones.of(args), clones.of(kwargs)
        # A second call for the first of a signature, to check that each call returns memory of its own.
        second = None if found.calls else (again.of(args), again.of(kwargs))
        written, unsure = _names(site, site.effects.writes), bool(site.effects.unsure)
        pristine = {address: copy_of(storage) for address, storage in clones.originals.items()} if unsure else {}
        found.telling = found.telling or _tells_apart(copied_args, copied_kwargs)
        before = self._states()
        returned = site.original(*args, **kwargs)
        after = self._states()
        self._restore(before)
        settings, modes = read_settings(), _modes()
        try:
            replaced = self._run(copied_args, copied_kwargs)
            drawn = self._states()
            given = [*clones.copies.values(), *again.copies.values()]
            same_memory = check.returned.again(_new_memory(replaced, given))
            if second is not None:
                same_memory |= check.returned.again(_new_memory(self._run(*second), given))
        finally:
            self._restore(after)
            entered = _leave(modes)
        sides = CallOutcomes(self._by_name(args, kwargs), self._by_name(copied_args, copied_kwargs), returned, replaced)
        judgement = judge(
            sides, len(site.kernel.schema.returns), clones, pristine, written, site.fills, check.tolerance
        )
        if any(not torch.equal(one, other) for one, other in zip(after, drawn, strict=True)):
            judgement.faults.append("leaves a random generator in a different state from the original")
        if same_memory:
            judgement.faults.append("returns the same memory from two calls, so that one overwrites the other")
        if entered:
            judgement.faults.append(f"leaves {entered}, which applies to everything after it")
        self._settings(settings, judgement)
        found.add(site.ordinal, judgement)
        return returned

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with poisoned(self._check.poison):
                return self._call(*args, **kwargs)
        except OpReplayError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            check, site = self._check, self._site
            failed = check.table.failed(site.ordinal, self._replacement, error)
            check.of(site, self._replacement).add(site.ordinal, Judgement([f"failed: {failed}"]))
            raise failed from error

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._check.generators]

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._check.generators, states, strict=True):
            generator.set_state(state)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._site.kernel.argument_names, args, strict=False)), **kwargs}

    @staticmethod
    def _settings(before: dict[str, Any], judgement: Judgement) -> None:
        after = read_settings()
        changed = [name for name, value in before.items() if after.get(name) != value]
        if changed:
            judgement.faults.append(f"changes the settings {', '.join(changed)}, which apply to everything after it")
            apply_settings(before)


def _tells_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a wrong kernel may be seen on these arguments: see SignatureCheck.telling."""
    parts = [part for value in (*args, *kwargs.values()) for _where, part in strided_parts(value, "")]
    several = [part for part in parts if isinstance(part, torch.Tensor) and part.numel() > 1 and has_memory(part)]
    return not several or any(_varies(part) for part in several)


def _varies(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # 8-bit floats have no comparison
    return bool((tensor != tensor.flatten()[0]).any())


def _modes() -> tuple[int, int, accelerators.Current]:
    """This thread's state that is not a setting: active modes, and the current stream."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), accelerators.Current()


def _leave(before: tuple[int, int, accelerators.Current]) -> str:
    """Restore the state from `_modes`; returns what had been changed, for people, "" if nothing was."""
    found = []
    dispatch, function, current = before
    if torch._C._len_torch_dispatch_stack() > dispatch or torch._C._len_torch_function_stack() > function:
        found.append("a mode (of torch dispatch or torch function, a default device is one) entered")
    while torch._C._len_torch_dispatch_stack() > dispatch:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > function:
        torch._C._pop_torch_function_stack()
    if accelerators.Current() != current:
        found.append("another stream or device current")
        current.restore()
    return " and ".join(found)


def _names(site: CallSite, slots: Sequence[int]) -> list[str]:
    """The arguments that have any of these tensor slots."""
    return [each.node.name for each in site.layout.args if set(each.tensors) & set(slots)]


def _new_memory(returned: Any, arguments: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """The storages of the returned tensors, without those of the arguments."""
    known = MemoryLabels((storage, "") for storage in arguments)
    found = (
        value.untyped_storage()
        for _where, value in strided_parts(returned, "")
        if isinstance(value, torch.Tensor) and has_memory(value) and value.numel()
    )
    return [storage for storage in found if known.find(storage) is None]


@dataclass(frozen=True)
class SubstitutionReport:
    """The findings of the checked pass, one entry for each signature and replacement, in order of first call."""

    checks: tuple[SignatureCheck, ...]
    choices: tuple[ConfigurationChoice, ...] = ()  # of autotuned kernels

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, in full sentences."""
        return tuple(sentence for check in self.checks for sentence in check.sentences())

    def with_(self, later: SubstitutionReport) -> SubstitutionReport:
        """This report combined with the larger distances that a later pass over the same calls found."""
        found = {(each.signature, each.replacement): each.distance for each in later.checks}
        return SubstitutionReport(
            tuple(
                replace(each, distance=each.distance.or_(found[each.signature, each.replacement]))
                for each in self.checks
            ),
            self.choices,
        )

    def as_text(self) -> list[str]:
        calls = sum(check.calls for check in self.checks)
        lines = [
            f"substituted: {counted(calls, 'call')} of {counted(len(self.checks), 'signature')}, "
            + ("each checked against the original kernel" if self.ok else "NOT equivalent to the original kernels")
        ]
        for check in self.checks:
            state = "" if check.ok else "wrong: "
            lines.append(
                f"  {check.signature} by {check.replacement}: {state}{counted(check.calls, 'call')}, "
                f"values {distances(check.distance)}"
            )
            lines += [f"    {fault}" for fault in check.faults]
            if not check.telling:
                lines.append(f"    note: {_NOT_TELLING}")
        if self.choices:
            other = sum(each.chosen != each.captured for each in self.choices)
            lines.append(
                f"autotuned again: {other} of {len(self.choices)} distinct launches are not in the captured "
                "configuration"
            )
        return lines + [f"  {each}" for each in self.choices]

    def as_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": "substitution",
                **{name: getattr(check, name) for name in _CHECK_FIELDS},
                **{name: getattr(check.distance, name) for name in ("elements", "different", "not_finite", "beyond")},
                "first_beyond": check.beyond,
                "worst": _worst_row(check),
                "largest_absolute": check.distance.largest_absolute,
                "largest_relative": check.distance.largest_relative,
                # A string: for 64-bit floats it may take more bits than a JSON number holds exactly.
                "largest_ulp": None if check.distance.largest_ulp is None else str(check.distance.largest_ulp),
                "tolerances": list(check.tolerances),
                "faults": list(check.faults),
                "fault_count": check.fault_count,
            }
            for check in self.checks
        ] + [each.row for each in self.choices]


_CHECK_FIELDS = ("signature", "kernel", "replacement", "ok", "telling", "calls", "first")


def _worst_row(check: SignatureCheck) -> dict[str, Any] | None:
    """The element farthest off; its values are texts, because JSON cannot express every number."""
    if check.worst is None:
        return None
    ordinal, where, _close = check.worst_place
    return {
        "ordinal": ordinal,
        "where": where,
        "index": None if check.worst.index is None else list(check.worst.index),
        "expected": str(check.worst.expected),
        "got": str(check.worst.got),
    }


class SubstitutionSession:
    """A plan's substitutions. `table` replaces kernels in every run; `report` is None before the checked pass."""

    def __init__(
        self, plan: PlanProtocol, loaded: LoadedRequests, tolerance: Tolerance, *, retune: bool = False
    ) -> None:
        """`retune`: autotuned kernels run in the configuration that is fastest here. Raises UsageError if what was
        requested does not fit the capture, ReplayRefused if the capture lacks what `retune` needs."""
        self.table = Substitutions(plan, loaded, retune=retune)
        self.report: SubstitutionReport | None = None
        self.poison = False  # with --guard: what a replacement leaves unwritten is NaN while it is checked
        self._plan, self._tolerance = plan, tolerance

    @property
    def notes(self) -> tuple[str, ...]:
        """What was asked for and is not done: kernels inside of graphs are those that were captured."""
        return (*self.table.left_inside_graphs(), *self.table.left_as_captured())

    def check(self, on_progress: Callable[[int], None] | None = None, *, again: bool = False) -> SubstitutionReport:
        """Run both kernels of every substituted call: once in the life of a plan, and once more with `again`.

        Raises SubstitutionRejected if a replacement is wrong, ReplayFailed if one raises, ReplayMismatch if
        the original kernels do not even give the captured scalars.
        """
        if self.report is None:
            self.report = self._run(on_progress)
        elif again and self.report.ok:
            found = self._run(on_progress)
            self.report = self.report.with_(found) if found.ok else found
        else:
            again = False
        if not self.report.ok:
            wrong = sum(not check.ok for check in self.report.checks)
            raise SubstitutionRejected(
                f"{self._plan.reader.path}: the replacements of {counted(wrong, 'signature')} "
                + (
                    "no longer do what the original kernels do, though they did at first"
                    if again
                    else "do not do what the original kernels do; nothing was timed"
                ),
                self.report,
            )
        return self.report

    def _run(self, on_progress: Callable[[int], None] | None) -> SubstitutionReport:
        plan = self._plan
        check = Check(self.table, plan.generators, self._tolerance, self.poison)
        result = plan.run_with(check, on_progress)
        report = SubstitutionReport(
            tuple(sorted(check.checks.values(), key=lambda each: each.first)), self.table.choices
        )
        if result.divergence is not None and report.ok:
            raise ReplayMismatch(
                f"{plan.reader.path}: no replacement could be judged, because the original kernels "
                f"differ from the capture themselves: {result.divergence}"
            )
        return report


SIDES = ("after", "before")
CANARIES = "canaries"
_MOST_FINDINGS = 20


class GuardedClones(Clones):
    """Copies with canaries on both sides, or on the CPU, for a `side`, between pages that cannot be read. `only`: the
    number of the one storage that is, None for all."""

    def __init__(self, side: str = "", only: int | None = None) -> None:
        super().__init__()
        self._side, self._number = side, only
        self.memories: list[Memory] = []

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = self.copies.get(storage._cdata)
        if copy is None:
            guarded = self._number is None or self._number == len(self.memories)
            self.memories.append(Memory(byte_tensor(storage), str(storage.device), pages=self._side if guarded else ""))
            copy = self.memories[-1].storage
            self.originals[storage._cdata], self.copies[storage._cdata] = storage, copy
        return copy


@dataclass
class GuardReport:
    """What was called between guards. `findings` are full sentences, the first for each kernel, argument and side."""

    calls: int = 0
    kernels: set[str] = field(default_factory=set)
    findings: dict[tuple[str, str, str], str] = field(default_factory=dict)
    guards: str = "unreadable pages"

    @property
    def text(self) -> str:
        return (
            f"guarded: {self.calls:,} calls of {len(self.kernels):,} kernels between {self.guards}: none "
            f"{'writes' if self.guards == CANARIES else 'uses'} memory beside its arguments"
        )


class _GuardPass:
    """Replaces every call with one that is also made on guarded memory."""

    reason = "kernels are called on guarded memory"

    def __init__(self, plan: PlanProtocol, table: Substitutions | None) -> None:
        self.plan, self._table, self.found = plan, table, GuardReport()

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = None
        if self._table is not None:
            replacement = self._table.find(site.signature_id, site.metas, site.ordinal)
        if site.once:
            return None
        if replacement is None:
            return None, _GuardedCall(self, site, site.original, "")
        return None, _GuardedCall(self, site, site.wrap(replacement.call), replacement.label)

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        return None if self._table is None else self._table.failure(ordinal, error)


class _GuardedCall:
    def __init__(self, guard: _GuardPass, site: CallSite, function: Callable[..., Any], label: str) -> None:
        self._guard, self._site, self._function, self._label = guard, site, function, label

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._guard.found
        name, scope = describe(self._guard.plan.reader, self._site.ordinal)
        found.calls += 1
        found.kernels.add(self._label or name)
        if found.guards == CANARIES:
            self._try_here(args, kwargs)
            return self._site.original(*args, **kwargs)
        for side in SIDES:
            end = self._try(args, kwargs, side)
            if end >= 0 and not end & 0xFF:
                continue
            if end < 0:  # it died: on which page?
                count = _storages(args, kwargs)
                numbers = [(each, side) for each in range(count) if self._try(args, kwargs, side, each) < 0]
                what = f"died of {signal.Signals(-end).name}"
            else:
                numbers, what = [((end & 0xFF) // 4, SIDES[(end & 0xFF) % 4 - 1])], "wrote"
            if not numbers:
                self._add("an argument", side, f"{name}: {what} between unreadable pages, and not with one at a time")
            for number, at in numbers:
                argument = self._names(args, kwargs, number)
                self._add(argument, at, f"{name}: accesses memory {at} argument {argument} ({what})")
        return self._site.original(*args, **kwargs)

    def _add(self, argument: str, side: str, text: str) -> None:
        name, scope = describe(self._guard.plan.reader, self._site.ordinal)
        by = f", by {self._label}" if self._label else ""
        inside = f", scope {scope}" if scope else ""
        key = (self._label or name, argument, side)
        self._guard.found.findings.setdefault(key, f"ordinal {self._site.ordinal}{inside}{by}: {text}")

    def _try_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call in this process, since no other can use the device: only what is written shows."""
        name, _scope = describe(self._guard.plan.reader, self._site.ordinal)
        clones = GuardedClones()
        given, named = clones.of(args), clones.of(kwargs)
        returned = None
        with undrawn(self._guard.plan.generators), suppress(Exception):  # what it raises, it raises in the replay, too
            returned = self._function(*given, **named)
        for number, memory in enumerate(clones.memories):
            at = memory.overwritten()
            if at:
                argument = self._names(args, kwargs, number)
                self._add(argument, at, f"{name}: accesses memory {at} argument {argument} (wrote)")
        del returned  # only now: it may be on this memory

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any], side: str, only: int | None = None) -> int:
        """Call in a forked process. Minus the signal that ended it; 0, or 4 times the storage plus 1 or 2 for the side
        on which it was written beside a storage."""
        child = os.fork()
        if not child:
            code = 0
            try:
                faulthandler.disable()
                torch.set_num_threads(1)  # the others' threads are not in this process
                clones = GuardedClones(side, only)
                given, named = clones.of(args), clones.of(kwargs)
                try:
                    self._function(*given, **named)
                except Exception:
                    code = 0  # what it raises, it raises in the replay, too
                for number, memory in enumerate(clones.memories[:60]):
                    at = memory.overwritten()
                    if at and not code:
                        code = 4 * number + 1 + SIDES.index(at)
            finally:
                os._exit(code)
        _done, status = os.waitpid(child, 0)
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> str:
        names = self._site.kernel.argument_names
        clones, found, known = Clones(), [], 0
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            clones.of(value)
            if known <= number < len(clones.copies):
                found.append(name)
            known = len(clones.copies)
        return ", ".join(found) or f"{number}"


def _storages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    clones = Clones()
    clones.of(args)
    clones.of(kwargs)
    return len(clones.copies)


def guard(plan: Any, on_progress: Callable[[int], None] | None = None) -> GuardReport:
    """Call every kernel of a plan, and its replacements, on guarded memory, too: on the CPU between unreadable pages,
    with other devices between canaries. Raises GuardViolated with what uses memory that is not its arguments'."""
    table = None
    if plan.substitution is not None:
        table = plan.substitution.table
        plan.substitution.poison = True
    guarded = _GuardPass(plan, table)
    if any(device.type not in ("cpu", "meta") for device in plan.devices):
        guarded.found.guards = CANARIES
    plan.run_with(guarded, on_progress)
    found = guarded.found
    if found.findings:
        sentences = tuple(found.findings.values())
        more = (f"and {len(sentences) - _MOST_FINDINGS} more",) if len(sentences) > _MOST_FINDINGS else ()
        raise GuardViolated(
            f"{plan.reader.path}: kernels use memory beside their arguments", (*sentences[:_MOST_FINDINGS], *more)
        )
    return found
