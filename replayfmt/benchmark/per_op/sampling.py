"""One sample of an op: a few calls, timed together.

The time between two events of a device that has nothing to do is the time that the host takes to issue what lies
between them. So on an accelerator calls are issued behind a *cover*, work that keeps the device busy meanwhile, with
nothing that waits in between. If the device comes to the first event before everything is issued, the sample does not
count, and is taken again behind a longer cover. Where no cover is long enough (the op itself waits for the device),
`why_exposed` says so.

Two events with nothing between them are some time apart, too. That is measured likewise, and subtracted. What is left
for a call that launches nothing on the device (a view) is less than any kernel takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from replayfmt.pytorch.accelerators import is_accelerator, spinning
from replayfmt.replay.run.isolated import IsolatedOp

from ..inputs import CacheFlush
from ..meters.meter import Clock, MakeMeter
from ..meters.stopwatch import Readings, Stopwatch, stopwatch_for

# Calls that leave their inputs unchanged are timed together for at least this long, so that reading the clock does not
# matter.
_SAMPLE_NS = 20_000
_MOST_CALLS = 10_000
# On an accelerator: what the host may take to issue a sample, and how many calls with events of their own are in it.
_ISSUE_NS = 200_000
_MOST_PAIRS = 8
_FIRST_COVER_NS = 30_000
_LONGEST_COVER_NS = 5_000_000
_EMPTY_PAIRS = 11
# No kernel of an accelerator takes less than twice this.
_NO_KERNEL_NS = 400
_EXPOSED = "the device waited for the host while the op was timed: it came to the op before everything was issued"

Cover = Callable[[float], None]  # issues work that takes about so many nanoseconds


@dataclass(frozen=True)
class Shape:
    """A sample: `pairs` of begin and end with `calls` calls in each."""

    pairs: int = 1
    calls: int = 1

    @property
    def total(self) -> int:
        return self.pairs * self.calls


class Sampler:
    """Takes samples of ops; `flush` empties the caches before each call."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        clock: Clock,
        meters: Sequence[MakeMeter],
        flush: CacheFlush | None,
        covers: Sequence[Cover] | None = None,
    ) -> None:
        """`covers` replaces those of the accelerators among `devices`."""
        self.watch = stopwatch_for(devices, clock, meters)
        self._hosts = stopwatch_for((), clock, meters)
        self._clock, self._flush = clock, flush
        self._accelerators = [device for device in devices if is_accelerator(device)]
        self._covers = [spinning(device) for device in self._accelerators] if covers is None else list(covers)
        self._cover_ns: float = _FIRST_COVER_NS
        self.pair_ns = 0.0  # between two events with nothing between them
        self.begin(on_host=False)
        if self._covers:
            self.pair_ns = statistics.median(self._taken(self.watch, lambda: None) for _ in range(_EMPTY_PAIRS))
            self.why_exposed = ""

    def begin(self, *, on_host: bool) -> None:
        """Another op follows; `on_host`: it works on no accelerator, so its time is the host's."""
        self._watch: Stopwatch = self._hosts if on_host else self.watch
        self._covered = bool(self._covers) and not on_host
        self.why_exposed = ""

    @property
    def step_ns(self) -> float | None:
        """The smallest step of the clock that the times are from; None if it is not known."""
        return self._watch.step_ns()

    def works_on_device(self, call_ns: float) -> bool:
        """Whether a call that takes so long launches anything; always, where times are not those of a covered
        device."""
        return not self._covered or bool(self.why_exposed) or call_ns >= _NO_KERNEL_NS

    def shape(self, op: IsolatedOp, first: Readings, share_ns: float) -> Shape:
        """The sample of an op whose `first` call is known; `share_ns` is the time that one sample should take.

        Memory has to be restored, or caches flushed, between any two calls: such calls have events of their own.
        """
        wanted = max(_SAMPLE_NS, share_ns) / max(first.real_ns, 1.0)
        if not self._covered:
            return (
                Shape() if op.writes or self._flush is not None else Shape(calls=int(max(1, min(wanted, _MOST_CALLS))))
            )
        issued = _ISSUE_NS / max(first.host_ns or first.cpu_ns, 1.0)
        several = int(max(1, min(wanted, issued)))
        if op.writes or self._flush is not None:
            return Shape(pairs=min(several, _MOST_PAIRS))
        return Shape(calls=several)

    def sample(self, op: IsolatedOp, shape: Shape) -> tuple[Readings, float]:
        """The readings of one call, and for how long the sample was timed, in nanoseconds."""
        while True:
            began = self._clock.real()
            self._synchronize()
            watch, ahead = self._watch, True
            watch.reset()
            start, stop = watch.start, watch.stop
            for _ in range(shape.pairs):
                op.restore()
                if self._flush is not None:
                    self._flush()
                if self._covered:
                    self._cover()
                else:
                    self._synchronize()
                start()
                op.calls(shape.calls)
                stop()
                ahead = ahead and not (self._covered and watch.began())
            self._synchronize()
            if ahead or not self._lengthen():
                break
        found = watch.read()
        if not self._covered:
            return found.per(shape.total), found.real_ns
        # Covers are part of it: what takes little on the device would otherwise take very long to measure.
        spent = float(self._clock.real() - began)
        return replace(found, real_ns=self._without_pairs(found.real_ns, shape.pairs)).per(shape.total), spent

    def launch(self, work: Callable[[], None]) -> float:
        """Nanoseconds of what one launch does, such as that of a graph."""
        return self._without_pairs(self._taken(self.watch, work), 1)

    def _without_pairs(self, taken_ns: float, pairs: int) -> float:
        return max(taken_ns - pairs * self.pair_ns, 0.0)

    def _taken(self, watch: Stopwatch, work: Callable[[], None]) -> float:
        while True:
            self._synchronize()
            watch.reset()
            if self._covers:
                self._cover()
            watch.start()
            work()
            watch.stop()
            ahead = not (self._covers and watch.began())
            self._synchronize()
            if ahead or not self._lengthen():
                return watch.read().real_ns

    def _cover(self) -> None:
        for cover in self._covers:
            cover(self._cover_ns)

    def _lengthen(self) -> bool:
        """Whether a longer cover may help; it stays for the ops that follow. One that did not help does not."""
        if self.why_exposed:
            return False
        if self._cover_ns >= _LONGEST_COVER_NS:
            self._cover_ns, self.why_exposed = _FIRST_COVER_NS, _EXPOSED
            return False
        self._cover_ns = min(2 * self._cover_ns, _LONGEST_COVER_NS)
        return True

    def _synchronize(self) -> None:
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
