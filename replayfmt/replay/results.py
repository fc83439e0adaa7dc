"""The results of a replay: outcome, first divergence, what was verified and how, memory, verdicts.

Plain values that print themselves. Unknown is None with a reason beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replayfmt.format.validation import counted

VerifyMode = Literal["auto", "bitwise", "close", "none"]
VERIFY_MODES: tuple[VerifyMode, ...] = ("auto", "bitwise", "close", "none")
Verdict = Literal["ok", "refused", "failed", "mismatched", "skipped"]
VERDICTS: tuple[Verdict, ...] = ("ok", "refused", "failed", "mismatched", "skipped")


class UnexpectedBehaviour(Exception):
    """An op did something other than when it was captured. Internal: becomes a divergence that names the op."""


@dataclass(frozen=True)
class SampleDistance:
    """How far apart two samples are: elements, those that differ, and the largest absolute and relative distances of
    finite ones (None: there are none, or no captured one that is not 0)."""

    elements: int
    differing: int
    absolute: float | None
    relative: float | None

    def __str__(self) -> str:
        if not self.differing:
            return f"the sample of {self.elements} elements is equal"
        text = f"{self.differing} of {self.elements} sampled elements differ"
        if self.absolute is not None:
            text = f"apart by {self.absolute:.3g}" if self.elements == 1 else f"{text}, by at most {self.absolute:.3g}"
        return text if self.relative is None else f"{text} (relative {self.relative:.3g})"


@dataclass(frozen=True)
class Divergence:
    """Where a replay first differs from its capture.

    `ordinal` is the op's whose result differs (of a host read: the read's own), `result` the index of the result, None
    if the difference is in none. `distance` says how far the samples, or the scalars, are apart; None if there is
    nothing to measure. `found_at` is the ordinal of the record that showed it. `written_by` is the last op that wrote
    what differs, or what a scalar was read from, by ordinal, where no digest of each op's results told; None: not found
    near it. `again` is what a second replay up to there did; None if there was none.
    """

    ordinal: int
    what: str
    result: int | None
    scope: str
    expected: str
    got: str
    distance: SampleDistance | None = None
    found_at: int | None = None
    written_by: int | None = None
    writer: str = ""  # that op's operator
    again: Literal["agrees", "differs in the same way", "differs otherwise", "fails"] | None = None

    @property
    def seen_at(self) -> int:
        """The ordinal of the record at which the difference showed."""
        return self.ordinal if self.found_at is None else self.found_at

    def __str__(self) -> str:
        place = f"ordinal {self.ordinal} ({self.what})"
        if self.result is not None:
            place += f", result {self.result}"
        if self.scope:
            place += f", scope {self.scope}"
        text = f"{place}: expected {self.expected}, got {self.got}"
        if self.distance is not None:
            text += f"; {self.distance}"
        if self.found_at is not None and self.found_at != self.ordinal:
            text += f" (seen at ordinal {self.found_at})"
        if self.written_by is not None:
            text += f"; last written by ordinal {self.written_by} ({self.writer})"
        return text if self.again is None else f"{text}; replayed again up to there, it {self.again}"


@dataclass
class Verification:
    """What was compared with the capture, and how. `mode` is what `asked` came to; `reasons` say why. `uncompared`
    counts the results for which a capture with digests has none. `inexact` counts the comparisons that differed within
    the `tolerances`, which are stated by the dtypes that were compared that way; `largest` are the largest relative
    distances among them, by dtype, of what digests hold: sampled elements, extremes and means.
    """

    asked: VerifyMode
    mode: VerifyMode
    reasons: tuple[str, ...] = ()
    digests: int = 0
    host_reads: int = 0
    scalars: int = 0
    structures: int = 0
    uncompared: int = 0
    inexact: int = 0
    tolerances: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line: what was verified, or why nothing was."""
        because = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        if self.mode == "none":
            compared = f"; compared {self.compared}" if self.scalars or self.structures else ""
            return f"not verified: {'; '.join(self.reasons)}{compared}"
        within = f"; {self.tolerance}" if self.tolerance else ""
        without = f"; not compared: {self.gap}" if self.uncompared else ""
        return f"{self.mode}{because}: {self.compared}{without}{within}"

    @property
    def tolerance(self) -> str:
        """How far apart values may be that count as close; "" where nothing was compared that way."""
        if not self.tolerances:
            return ""
        found = ", ".join(f"{dtype} {relative:g}" for dtype, relative in sorted(self.tolerances.items()))
        return f"tolerances: {found}, relative to the value or the tensor's root mean square, whichever is larger"

    @property
    def gap(self) -> str:
        """What nothing was compared with."""
        return f"{counted(self.uncompared, 'result')} without a digest, or without one of all that was written"

    @property
    def compared(self) -> str:
        scalars = f"{counted(self.scalars, 'scalar')} the program read"
        if self.mode == "none":
            shapes = f"the dtypes and sizes of {_results(self.structures)}"
            parts = [text for count, text in ((self.scalars, scalars), (self.structures, shapes)) if count]
            return " and ".join(parts) or scalars
        digests = f"{counted(self.digests, 'digest')}, {counted(self.host_reads, 'host read')}, {scalars}"
        inexact = f"; {self.inexact:,} of these differ within the tolerances" if self.inexact else ""
        if self.largest:
            inexact += ", at most by " + ", ".join(f"{dtype} {far:.2g}" for dtype, far in sorted(self.largest.items()))
        return f"{digests}, the shapes of {_results(self.structures)}{inexact}"

    def __str__(self) -> str:
        return self.text


def _results(ops: int) -> str:
    return "1 op's results" if ops == 1 else f"{ops:,} ops' results"


@dataclass(frozen=True)
class PeakMemory:
    """The most memory a device held during the replay, in bytes; None if that was not measured, and `note` says why.

    `before_bytes` is what it held when the ops began.
    """

    device: str
    peak_bytes: int | None
    before_bytes: int | None
    note: str


@dataclass(frozen=True)
class OpVerdict:
    """What became of one op under keep_going. `reason` is empty for `ok`. `cause`: the ordinal of the first op whose
    result differs, if this op differs and works on what follows from that."""

    ordinal: int
    op: str
    verdict: Verdict
    reason: str = ""
    cause: int | None = None


@dataclass(frozen=True)
class OpaqueResult:
    """Result `index` of an operator holds bytes that no replay reproduces, so it is never compared. `why` says how that
    is known."""

    op: str
    index: int
    why: str
    calls: int

    def __str__(self) -> str:
        calls = f"{self.calls} call{'s' if self.calls > 1 else ''}"
        return f"result {self.index} of {self.op}, {calls}: {self.why}"


@dataclass
class ReplayResult:
    """A finished replay. `elapsed_ns` counts the ops alone: state is restored and results are verified outside of it.

    `outcome` is `ok` if everything in the capture was replayed and nothing differs, `incomplete` if something was left
    out: ops whose verdict says so, `unsupported` records, or what `left_out` names, which are records that are
    not ops. `nondeterministic` names the ops that differ from themselves on the same inputs, `elsewhere` says what
    child processes did, which is no part of the capture. `scope_ns` maps scope paths to the time spent inside them,
    where that was requested. `execution` counts how often the plan ran its ops by then: the first one is cold.
    """

    outcome: Literal["ok", "mismatched", "incomplete"]
    elapsed_ns: int
    ops: int
    kernels: int
    scopes: int
    verification: Verification
    divergence: Divergence | None = None
    memory: tuple[PeakMemory, ...] = ()
    nondeterministic: tuple[str, ...] = ()
    verdicts: tuple[OpVerdict, ...] | None = None
    scope_ns: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unsupported: int = 0
    elsewhere: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    opaque_results: tuple[OpaqueResult, ...] = ()
    execution: int = 1

    @property
    def verified(self) -> str:
        """One line: what was verified, and of how much of the capture; never more than the outcome says."""
        text = self.verification.text
        if self.elsewhere and self.verification.mode != "none":
            text = f"this process alone: {text}"
        if self.outcome == "mismatched":
            return f"differs: {text}"
        return text if self.outcome == "ok" or self.verification.mode == "none" else f"the part that ran: {text}"

    def totals(self) -> dict[Verdict, int]:
        """How many ops got each verdict; empty without keep_going."""
        if self.verdicts is None:
            return {}
        counts: dict[Verdict, int] = dict.fromkeys(VERDICTS, 0)
        for each in self.verdicts:
            counts[each.verdict] += 1
        return counts
