"""A pass over a replay in which each kernel, the captured one or its replacement, is also called on guarded memory.

The arguments of a call are copied between unreadable pages, once close to the page behind them and once to the one
before; canaries fill what is left of their own pages. The call is made in a forked process, so a kernel that touches a
page ends that alone. Which argument and side it was is found by further calls with one unreadable page each. The replay
itself continues with what the original returns. When replacements are checked afterwards, new memory is NaN.

A forked process has no use of accelerators: the pass is for kernels of the CPU.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from replayfmt.errors import GuardViolated, SubstitutionFailed, UsageError
from replayfmt.pytorch.guards import Memory
from replayfmt.pytorch.tensors.memory import byte_tensor

from ..planning.kernels import CallSite
from ..run.copies import Clones
from .session import PlanProtocol, failure
from .table import Substitutions

SIDES = ("after", "before")
_MOST_FINDINGS = 20


class GuardedClones(Clones):
    """Copies between pages that cannot be read. `only`: the number of the one storage that is, None for all."""

    def __init__(self, side: str, only: int | None = None) -> None:
        super().__init__()
        self._side, self._number = side, only
        self.memories: list[Memory] = []

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = self.copies.get(storage._cdata)
        if copy is None:
            guarded = self._number is None or self._number == len(self.memories)
            self.memories.append(Memory(byte_tensor(storage), "cpu", pages=self._side if guarded else ""))
            copy = self.memories[-1].storage
            self.originals[storage._cdata], self.copies[storage._cdata] = storage, copy
        return copy


@dataclass
class GuardReport:
    """What was called between guards. `findings` are full sentences, the first for each kernel, argument and side."""

    calls: int = 0
    kernels: set[str] = field(default_factory=set)
    findings: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return (
            f"guarded: {self.calls:,} calls of {len(self.kernels):,} kernels between unreadable pages: none uses "
            f"memory beside its arguments"
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
        replacement = None if self._table is None else self._table.at(ordinal)
        if replacement is None:
            return None
        return failure(self.plan.reader, self.plan.describe, ordinal, replacement, error)


class _GuardedCall:
    def __init__(self, guard: _GuardPass, site: CallSite, function: Callable[..., Any], label: str) -> None:
        self._guard, self._site, self._function, self._label = guard, site, function, label

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._guard.found
        name, scope = self._guard.plan.describe(self._site.ordinal)
        found.calls += 1
        found.kernels.add(self._label or name)
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
        name, scope = self._guard.plan.describe(self._site.ordinal)
        by = f", by {self._label}" if self._label else ""
        inside = f", scope {scope}" if scope else ""
        key = (self._label or name, argument, side)
        self._guard.found.findings.setdefault(key, f"ordinal {self._site.ordinal}{inside}{by}: {text}")

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
        """The arguments on a storage, by its number."""
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
    """Call every kernel of a plan, and its replacements, on guarded memory, too. Raises GuardViolated with what uses
    memory that is not its arguments'; UsageError for a plan with other devices than the CPU."""
    other = [str(device) for device in plan.devices if device.type not in ("cpu", "meta")]
    if other:
        raise UsageError(f"--guard is for kernels of the CPU; the replay uses {', '.join(other)}")
    table = None
    if plan.substitution is not None:
        table = plan.substitution.table
        plan.substitution.poison = True
    guarded = _GuardPass(plan, table)
    plan.run_with(guarded, on_progress)
    found = guarded.found
    if found.findings:
        sentences = tuple(found.findings.values())
        more = (f"and {len(sentences) - _MOST_FINDINGS} more",) if len(sentences) > _MOST_FINDINGS else ()
        raise GuardViolated(
            f"{plan.reader.path}: kernels use memory beside their arguments", (*sentences[:_MOST_FINDINGS], *more)
        )
    return found
