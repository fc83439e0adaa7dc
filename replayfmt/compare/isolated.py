"""Every op of a capture run in two ways on the same true inputs, so that each op's own error is seen, and none that it
inherits.

`OtherWay` runs one call of a replay on another device, under other settings, or with a substituted kernel, on copies of
what it writes. The replay goes on with its own results, and both are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.validation import counted, printable
from replayfmt.pytorch.environment import changed_by, parse_setting, settings_changed
from replayfmt.pytorch.rounding import MARGIN, rounding_runs, spread_of
from replayfmt.pytorch.tensors.memory import DTYPE_CODE
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import CallSite, KernelStandIn, OperatorKernel
from replayfmt.replay.planning.records import describe
from replayfmt.replay.run.content import Clones
from replayfmt.replay.run.run_twice import Outcome, RunTwice, only_views, same_elements, written_storages
from replayfmt.replay.substitution.distance import Distance, distance, scale_of, worst_element
from replayfmt.replay.substitution.distance import Tolerance as Close

from .distances import Tolerance, parse_tolerance
from .results import line


class OtherWay:
    """`against` is a device, `settings` are texts NAME=VALUE or a mapping. The plan's substitutions belong to it."""

    def __init__(
        self, plan: Plan, against: str | None = None, settings: Sequence[str] | Mapping[str, Any] = ()
    ) -> None:
        """Raises UsageError if it is no other way, or not possible here."""
        self._plan = plan
        self._table = None if plan.substitution is None else plan.substitution.table
        pairs = settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings)
        self._settings = dict(pairs)
        self._names = changed_by(self._settings)
        self._device = None if against is None else _device(against)
        if self._device is None and not self._settings and self._table is None:
            raise UsageError(
                "nothing says how the other way differs: give --against=DEVICE, --set=NAME=VALUE or "
                "--replay-kernel-substitution"
            )
        self._generators = [each for each in dict.fromkeys(plan.generators) if each is not None]

    @property
    def text(self) -> str:
        """For people: how it differs."""
        parts = [] if self._device is None else [f"on {self._device}"]
        parts += [f"{name}={value}" for name, value in self._settings.items()]
        return ", ".join([*parts, *([] if self._table is None else ["substituted kernels"])])

    def why_not(self, site: CallSite) -> str | None:
        """Why an op is not run the other way: "" if that is all the same, None if it is."""
        if site.once or not site.fills or only_views(site):
            return ""
        if self._table is not None and self._device is None and not self._settings and self._replaced(site) is None:
            return ""
        if self._device is not None:
            if site.kernel.draws:
                return "draws random numbers, which differ between devices"
            if not isinstance(site.kernel, OperatorKernel):
                return "is code for the captured device"
        return None

    def _replaced(self, site: CallSite) -> Callable[..., Any] | None:
        if self._table is None:
            return None
        replacement = self._table.find(site.signature_id, site.metas, site.ordinal)
        return None if replacement is None else site.wrap(replacement.call)

    def copies(self, site: CallSite, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments for it, taken before the op itself runs."""
        if self._device is not None:
            clones = Clones(self._device)
        else:
            clones = Clones(only=written_storages(site, args, named))
        return clones.of(args), clones.of(named)

    def run(self, site: CallSite, copies: tuple[Any, Any], states: list[torch.Tensor]) -> Outcome:
        """What it returns and writes with such arguments, from these states of the random generators, which it leaves
        as they are. Raises whatever it raises."""
        function = self._replaced(site) or site.original
        args, named = copies
        with (
            self.drawing_from(site, states),
            settings_changed(self._settings, self._names) if self._settings else nullcontext(),
        ):
            returned = function(*args, **named)
        return Outcome.of(site, returned, args, named)

    @contextmanager
    def drawing_from(self, site: CallSite, states: list[torch.Tensor]) -> Iterator[None]:
        """With the random generators in these states; afterwards they are as they were before."""
        before = self.states(site)
        self._restore(states)
        try:
            yield
        finally:
            self._restore(before)

    def states(self, site: CallSite) -> list[torch.Tensor]:
        """The states of the random generators that an op may draw from."""
        drawing = site.kernel.draws or not site.kernel.own
        return [each.get_state() for each in self._generators] if drawing else []

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--against={text}: is no device that works here: {reason}") from None
    return device


_SHOWN = 20


@dataclass(frozen=True)
class Apart:
    """One call whose results differ. `error` is the largest absolute distance relative to the result's root mean
    square, None where there is no number for it; `beyond`: it is more than the tolerance allows."""

    ordinal: int
    result: str
    distance: Distance
    error: float | None
    beyond: bool
    worst: str
    problem: str = ""  # it failed the other way, or returned something of another form
    nondeterministic: bool = False  # it also differs from itself

    @property
    def rank(self) -> tuple[bool, bool, float]:
        return self.beyond, bool(self.problem) or bool(self.distance.not_finite), self.error or 0.0


@dataclass
class IsolatedKernel:
    """The calls of one kernel: how many ran both ways, how many of these differ, and the worst of them."""

    kernel: str
    calls: int = 0
    different: int = 0
    beyond: int = 0
    worst: Apart | None = None


@dataclass
class Isolated:
    """Every op run in two ways. `kernels` are worst first; `skipped` says which were not, and why. Prints as what
    `opreplay-compare --isolate` prints."""

    path: str
    way: str
    tolerance: str
    compared: int
    kernels: list[IsolatedKernel] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    divergence: str | None = None  # of the replay from its capture: then the inputs are not the true ones

    @property
    def outcome(self) -> str:
        if not self.compared or self.divergence is not None:
            return "not compared"
        return "different" if any(each.beyond for each in self.kernels) else "equal"

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"

    @property
    def text(self) -> str:
        worse = [each for each in self.kernels if each.different]
        lines = [line("a", self.path), line("other way", self.way)]
        lines.append(line("compared", f"{counted(self.compared, 'op')} on the same inputs, tolerance {self.tolerance}"))
        lines += [line("not run", f"{counted(count, 'op')}: {why}") for why, count in self.skipped.items()]
        if self.divergence is not None:
            lines.append(
                line("note", f"the replay itself differs from its capture, so inputs differ: {self.divergence}")
            )
        for each in worse[:_SHOWN]:
            lines += _lines(each)
        if len(worse) > _SHOWN:
            lines.append(line("", f"and {len(worse) - _SHOWN:,} more kernels"))
        beyond = sum(each.beyond for each in self.kernels)
        said = {
            "equal": f"no op differs by more than the tolerance {self.tolerance}",
            "different": f"{counted(beyond, 'op')} by more than the tolerance; the worst kernel first",
            "not compared": "no op could be compared",
        }
        return "\n".join([*lines, line(self.outcome, said[self.outcome])])

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        head = {
            "kind": "isolated",
            **{name: getattr(self, name) for name in ("path", "way", "tolerance", "outcome", "compared", "skipped")},
            "divergence": self.divergence,
        }
        return head, *(_row(each) for each in self.kernels)

    def __str__(self) -> str:
        return self.text


def _lines(each: IsolatedKernel) -> list[str]:
    worst = each.worst
    assert worst is not None
    beyond = f", {each.beyond:,} beyond" if each.beyond else ", none beyond"
    lines = [line("kernel", f"{each.kernel}: {each.different:,} of {counted(each.calls, 'call')} differ{beyond}")]
    far = worst.distance
    parts = [f"{far.different:,} of {far.elements:,} elements"] if far.elements else []
    parts += [f"absolute {far.largest_absolute:.3g}"] if far.largest_absolute is not None else []
    parts += [f"relative {far.largest_relative:.3g}"] if far.largest_relative is not None else []
    parts += [f"{far.largest_ulp:,} ULP"] if far.largest_ulp is not None else []
    parts += [f"{far.not_finite:,} not finite in one of both"] if far.not_finite else []
    parts += [worst.worst] if worst.worst else []
    parts += ["and differs from itself on these inputs"] if worst.nondeterministic else []
    return [*lines, line("  worst", f"ordinal {worst.ordinal}, {worst.result}: {worst.problem or ', '.join(parts)}")]


def _row(each: IsolatedKernel) -> dict[str, Any]:
    worst = each.worst
    return {
        "kind": "isolated_kernel",
        **{name: getattr(each, name) for name in ("kernel", "calls", "different", "beyond")},
        "worst": None
        if worst is None
        else {
            "ordinal": worst.ordinal,
            "result": worst.result,
            **{name: getattr(worst.distance, name) for name in ("elements", "different", "not_finite")},
            "absolute": worst.distance.largest_absolute,
            "relative": worst.distance.largest_relative,
            "ulp": worst.distance.largest_ulp,
            "error": worst.error,
            "element": worst.worst,
            "problem": worst.problem,
            "nondeterministic": worst.nondeterministic,
        },
    }


def isolate(
    path: str | PathLike[str],
    *,
    against: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    tolerance: str = "exact",
    **options: Any,
) -> Isolated:
    """Run each op of a capture in two ways on the same inputs, as `opreplay-compare --isolate` does: as the capture
    says, on its devices or on `devices`, and on the device `against`, under other `settings` or with `substitutions`.
    `options` are those of a Plan.

    Raises UsageError, and what a replay raises.
    """
    with Plan(path, **options) as plan:
        return isolate_plan(plan, OtherWay(plan, against, settings), parse_tolerance(tolerance))


def isolate_plan(
    plan: Plan, way: OtherWay, tolerance: Tolerance, on_progress: Callable[[int], None] | None = None
) -> Isolated:
    """The same for a plan that is ready."""
    both = _BothWays(plan, way, tolerance)
    result = plan.run_with(both, on_progress, verify="auto")
    if both.apart:
        # Those that differ may hold bytes that nothing wrote, or differ from themselves.
        twice = RunTwice(plan.generators, both.apart.keys())
        plan.run_with(twice, on_progress)
        if plan.learn(twice):
            return isolate_plan(plan, way, tolerance, on_progress)
        for ordinal in twice.unsteady:
            both.apart[ordinal] = replace(both.apart[ordinal], nondeterministic=True)
    differs = None if result.divergence is None else str(result.divergence)
    kernels: dict[str, IsolatedKernel] = {}
    for ordinal in np.flatnonzero(both.compared).tolist():
        name = describe(plan.reader, ordinal)[0]
        kernel = kernels.setdefault(name, IsolatedKernel(name))
        kernel.calls += 1
        apart = both.apart.get(ordinal)
        if apart is not None:
            kernel.different += 1
            kernel.beyond += apart.beyond
            if kernel.worst is None or apart.rank > kernel.worst.rank:
                kernel.worst = apart
    ranked = sorted(kernels.values(), key=lambda each: (False, False, -1.0) if not each.worst else each.worst.rank)
    skipped = Counter(both.skipped.values())
    return Isolated(
        plan.reader.path, way.text, tolerance.text, int(both.compared.sum()), ranked[::-1], dict(skipped), differs
    )


class _BothWays(KernelStandIn):
    """Runs each op of a replay the other way, too. A replay may begin again: what is found is by ordinal."""

    reason = "each op also runs another way"

    def __init__(self, plan: Plan, way: OtherWay, tolerance: Tolerance) -> None:
        self.way, self.tolerance, self.plan = way, tolerance, plan
        self.compared = np.zeros(plan.reader.record_count, bool)
        self.apart: dict[int, Apart] = {}
        self.skipped: dict[int, str] = {}
        self.opaque = plan.preparation.opaque_slots()

    def call(self, site: CallSite) -> tuple[None, Callable[..., Any]] | None:
        why = self.way.why_not(site)
        if why is None:
            return None, partial(self._both, site)
        if why:
            self.skipped[site.ordinal] = why
        return None

    def _both(self, site: CallSite, /, *args: Any, **kwargs: Any) -> Any:
        way = self.way
        states = way.states(site)
        kept = Clones()
        pristine = (kept.of(args), kept.of(kwargs)) if self.tolerance.auto else None
        try:
            copies = way.copies(site, args, kwargs)
        except RuntimeError as error:
            self.skipped[site.ordinal] = f"its inputs cannot be copied: {first_line(error)}"
            return site.original(*args, **kwargs)
        returned = site.original(*args, **kwargs)
        self.compared[site.ordinal] = True
        self.apart.pop(site.ordinal, None)
        try:
            got = way.run(site, copies, states)
        except OpReplayError:
            raise
        except Exception as error:  # whatever an operator of another device raises
            problem = f"fails the other way: {type(error).__name__}: {first_line(error)}"
            self.apart[site.ordinal] = Apart(site.ordinal, "all results", Distance(), None, True, "", problem)
            return returned
        expected = Outcome.of(site, returned, args, kwargs)

        def spread() -> dict[int, float]:
            assert pristine is not None

            def outputs(taken: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor] | None:
                try:
                    with way.drawing_from(site, states):
                        return list(Outcome.of(site, site.original(*taken, **named), taken, named).values.values())
                except Exception:
                    return None

            return spread_of(list(expected.values.values()), rounding_runs(outputs, *pristine))

        self._judge(site, expected, got, spread)
        return returned

    def _judge(self, site: CallSite, expected: Outcome, got: Outcome, spread: Callable[[], dict[int, float]]) -> None:
        """Compare what both ways computed, and keep the worst of it."""
        worst: Apart | None = None
        slots = set(self.opaque.get(site.signature_id, ()))
        opaque = {
            one.untyped_storage()._cdata
            for (label, _part), one in expected.values.items()
            if isinstance(label, int) and slots & set(site.layout.results[label].tensors)
        }
        for place, ((label, part), one) in enumerate(expected.values.items()):
            if one.untyped_storage()._cdata in opaque:
                continue
            where = f"result {label}{part}" if isinstance(label, int) else f"argument {label}{part}"
            other = got.values.get((label, part))
            if other is None or other.dtype != one.dtype or other.shape != one.shape:
                found = Apart(site.ordinal, where, Distance(), None, True, "", "has another form the other way")
            else:
                other = other.to(one.device)
                if same_elements(one, other):
                    continue
                allowed = self.tolerance.of(describe(self.plan.reader, site.ordinal)[0], DTYPE_CODE[one.dtype])
                close = Close(allowed.relative, allowed.absolute)
                far = distance(one, other, close)
                if not far.different:
                    continue  # zeros of another sign
                beyond = far.beyond > 0
                if allowed.ulp:
                    beyond = bool(far.not_finite) or far.largest_ulp is None or far.largest_ulp > allowed.ulp
                if self.tolerance.auto:
                    known = spread().get(place)
                    beyond = bool(far.not_finite) or known is None or (far.largest_absolute or 0) > MARGIN * known
                number = one.is_floating_point() or one.is_complex()
                scale = scale_of(one, Close()) if number else 0.0
                error = None if far.largest_absolute is None or not scale else far.largest_absolute / scale
                element = str(worst_element(one, other, close)) if far.beyond else ""
                found = Apart(site.ordinal, where, far, error, beyond, element)
            if worst is None or found.rank > worst.rank:
                worst = found
        if worst is not None:
            self.apart[site.ordinal] = worst


def first_line(error: BaseException) -> str:
    return printable((str(error).strip().splitlines() or ["?"])[0], 300)
