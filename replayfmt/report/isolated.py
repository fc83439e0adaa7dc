"""Isolated calls as a timeline: the time that each op takes in a loop of its own, one after the other in capture order.

It shows what the replay of each op costs where nobody recorded a whole replay. Nothing overlaps in it, and there are no
gaps: what ran at the same time, and what the host did between ops, is not known from isolated calls.
"""

from __future__ import annotations

from replayfmt.benchmark.comparison.baseline import Document
from replayfmt.errors import UsageError

from .measured import Measurements, read_measurements


class IsolatedTimes:
    """Nanoseconds of a call, by its signature (without numbers); from a benchmark that was summed by kernel, the mean
    of all of the kernel's calls."""

    def __init__(self, measured: Measurements) -> None:
        self._by_signature = {name: each.call_ns for name, each in measured.by_signature.items()}
        self._by_kernel = {name: (each.call_ns, each.calls) for name, each in measured.by_kernel.items()}

    def __bool__(self) -> bool:
        """Whether the time of any call is known."""
        return any(each is not None for each in self._by_signature.values()) or any(
            each is not None for each, _calls in self._by_kernel.values()
        )

    def call_ns(self, signature: str, kernel: str, calls: int) -> float | None:
        """None if no such call was measured. `calls`: how many of the kernel the capture has. A mean of some of them is
        not the time of the others."""
        if signature in self._by_signature:
            return self._by_signature[signature]
        mean, measured = self._by_kernel.get(kernel, (None, 0))
        return mean if measured == calls else None


def read_isolated(where: str, document: Document) -> IsolatedTimes:
    """The times in a benchmark's document, which `where` names. Raises UsageError if it has none of single ops."""
    found = IsolatedTimes(read_measurements([(where, document)], None))
    if not found:
        raise UsageError(
            f"{where}: has no times of single ops; expected a file that opreplay-benchmark --per-op --benchmark-out "
            "wrote, not with --group-by=scope"
        )
    return found
