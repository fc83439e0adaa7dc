"""The other way to run an op: on another device, under other settings, or with a substituted kernel.

`OtherWay` runs one call of a replay that other way, on copies of what it writes, and gives the results back where the
replay has its own. `isolated` compares these with the replay's, `bisected` goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.environment import changed_by, parse_setting, settings_changed
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import CallSite, OperatorKernel
from replayfmt.replay.run.copies import Clones, has_memory
from replayfmt.replay.run.run_twice import Outcome, only_views


@dataclass(frozen=True)
class Called:
    """One call that ran the other way: what it returned, and its arguments afterwards, on copies where it may have
    written them. `clones` has these copies."""

    returned: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    clones: Clones


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

    def copies(self, site: CallSite, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Clones, Any, Any]:
        """The arguments for it, taken before the op itself runs."""
        if self._device is not None:
            clones = Clones(self._device)
        else:
            names = [each.node.name for each in site.layout.args if set(each.tensors) & set(_written(site))]
            given = {**dict(zip(site.kernel.argument_names, args, strict=False)), **named}
            clones = Clones(only={key for name in names for key in _storages(given.get(name))})
        return clones, clones.of(args), clones.of(named)

    def run(self, site: CallSite, copies: tuple[Clones, Any, Any], states: list[torch.Tensor]) -> Called:
        """Run it with such arguments, from these states of the random generators, which it leaves as they are. Raises
        whatever it raises."""
        function = self._replaced(site) or site.original
        clones, args, named = copies
        after = self.states(site)
        self._restore(states)
        try:
            with settings_changed(self._settings, self._names) if self._settings else nullcontext():
                returned = function(*args, **named)
        finally:
            self._restore(after)
        return Called(returned, args, named, clones)

    def states(self, site: CallSite) -> list[torch.Tensor]:
        """The states of the random generators that an op may draw from."""
        drawing = site.kernel.draws or not site.kernel.own
        return [each.get_state() for each in self._generators] if drawing else []

    def _restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)


def outcome(site: CallSite, called: Called) -> Outcome:
    return Outcome.of(site, called.returned, called.args, called.named)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--against={text}: is no device that works here: {reason}") from None
    return device


def _written(site: CallSite) -> tuple[int, ...]:
    return (*site.effects.writes, *site.effects.unsure)


def _storages(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and has_memory(value)
        return [value.untyped_storage()._cdata] if strided else []
    if isinstance(value, torch.UntypedStorage):
        return [value._cdata]
    return [each for part in value for each in _storages(part)] if isinstance(value, list | tuple) else []
