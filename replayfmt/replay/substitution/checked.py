"""The untimed pass in which both kernels run: how each replacement behaved, signature by signature.

At every call the original runs on the real arguments, and the replay continues with its result; the replacement runs on
copies of the arguments, from the same state of the random generators, and is judged. Every call is thus judged on its
captured arguments, even if an earlier replacement was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replayfmt.errors import OpReplayError, SubstitutionFailed
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch import accelerators
from replayfmt.pytorch.settings import apply_settings, read_settings

from .call_sites import CallSite
from .clones import Clones, copy_of, has_memory, strided_parts
from .distance import Distance, Tolerance
from .judging import Judgement, Sides, judge
from .loading import Replacement
from .memory_labels import MemoryLabels, Returned
from .table import Substitutions
from .worst import Worst

_MOST_FAULTS = 5


@dataclass
class SignatureCheck:
    """How a replacement behaved in the calls of one signature. `first` is the ordinal of the first call.

    `faults` are sentences about its behaviour (the first few; `fault_count` counts all of them); `beyond` names the
    first call with a value that is too far off, None if there is none; `worst` is the element farthest off in all
    calls, `worst_place` the call's ordinal, and the result or argument.
    """

    signature: str
    kernel: str
    replacement: str
    first: int
    calls: int = 0
    distance: Distance = field(default_factory=Distance)
    tolerances: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    beyond: int | None = None
    worst: Worst | None = None
    worst_place: tuple[int, str, str] = (0, "", "")  # with the tolerance used

    @property
    def ok(self) -> bool:
        return not self.fault_count and self.beyond is None

    def add(self, ordinal: int, judgement: Judgement) -> None:
        """Add one call."""
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


class Check:
    """Replaces every substituted call with a checked call. `checks` has the findings, by signature."""

    def __init__(
        self,
        reader: CaptureReader,
        table: Substitutions,
        generators: Sequence[torch.Generator | None],
        describe: Callable[[int], tuple[str, str]],
        tolerance: Tolerance,
    ) -> None:
        self.reader, self.tolerance, self.describe = reader, tolerance, describe
        self.checks: dict[tuple[str, str], SignatureCheck] = {}
        unique = dict.fromkeys((*generators, *accelerators.default_generators()))
        self.generators = [generator for generator in unique if generator is not None]
        self.returned = Returned()
        self._table = table

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = self._table.find(site.signature_id, site.metas, site.ordinal)
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
        return self._table.reason

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        return None  # a checked call reports its replacement's failures itself

    def of(self, site: CallSite, replacement: Replacement) -> SignatureCheck:
        """The findings on a site's signature."""
        text = self._table.index.text((site.signature_id, site.metas), site.ordinal)
        key = (text, replacement.label)
        if key not in self.checks:
            name, _scope = self.describe(site.ordinal)
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
        sides = Sides(self._by_name(args, kwargs), self._by_name(copied_args, copied_kwargs), returned, replaced)
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
            return self._call(*args, **kwargs)
        except OpReplayError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            check, site = self._check, self._site
            failed = failure(check.reader, check.describe, site.ordinal, self._replacement, error)
            check.of(site, self._replacement).add(site.ordinal, Judgement([f"failed: {failed}"]))
            raise failed from error

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._check.generators]

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._check.generators, states, strict=True):
            generator.set_state(state)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = self._site.kernel.argument_names
        return {**dict(zip(names, args, strict=False)), **kwargs}

    @staticmethod
    def _settings(before: dict[str, Any], judgement: Judgement) -> None:
        after = read_settings()
        changed = [name for name, value in before.items() if after.get(name) != value]
        if changed:
            judgement.faults.append(f"changes the settings {', '.join(changed)}, which apply to everything after it")
            apply_settings(before)


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


def failure(
    reader: CaptureReader,
    describe: Callable[[int], tuple[str, str]],
    ordinal: int,
    replacement: Replacement,
    error: BaseException,
) -> SubstitutionFailed:
    """The error to raise for an exception from a replacement."""
    what, scope = describe(ordinal)
    inside = f", scope {scope}" if scope else ""
    first_line = str(error).strip().partition("\n")[0]
    return SubstitutionFailed(
        f"{reader.path}: ordinal {ordinal} ({what}{inside}): the replacement {replacement.label} failed at "
        f"{replacement.place_of(error)}: {type(error).__name__}: {first_line}",
        replacement.traceback_of(error),
    )
