"""Is a capture's work deterministic? Replays of one capture, compared with each other op by op.

Each replay is recorded (`record_plan`) in a folder for temporary files, without content, and only what is needed to
compare stays. The first op whose results differ had the same inputs each time, since everything before it is
equal: it differs from itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.format.reader import open_capture
from replayfmt.format.validation import counted, printable

from .alignment import align_recorded
from .distances import Distance, Tolerance
from .divergence import differing
from .results import distance_json, observed_distance
from .trace import Side, read_trace

_MOST_ROWS = 1000
_SHOWN = 5
# Records a replay in a process of its own: its arguments are the capture, the file to write, and options as JSON.
_IN_A_PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); from replayfmt.trim.recorded import record_replay; "
    "record_replay(sys.argv[1], sys.argv[2], digests='ops', **json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class Unsteady:
    """An op whose results are not the same in all replays. `replays` are those (from 1) that do not show what most of
    them do, `variants` how many different results there are; `distance` is between two of them."""

    ordinal: int
    kernel: str
    scope: str
    call: str
    replays: tuple[int, ...]
    variants: int
    distance: Distance | None = None


@dataclass(frozen=True)
class Repeated:
    """Replays of one capture. `first` is the first op that differs from itself, None if none does; `others` are the ops
    that differ, too, most of them because they depend on it. `compared` counts the results of one replay. Prints as
    what `opreplay-run --repeat` prints."""

    path: str
    replays: int
    processes: bool
    compared: int
    first: Unsteady | None
    others: tuple[Unsteady, ...] = ()

    @property
    def ok(self) -> bool:
        return self.first is None and self.compared > 0

    @property
    def outcome(self) -> str:
        return "deterministic" if self.ok else "nondeterministic" if self.first else "not compared"

    @property
    def text(self) -> str:
        how = f"{counted(self.replays, 'replay')}{', each in a fresh process' if self.processes else ''}"
        lines = [self.path, f"repeated: {how}, of which {counted(self.compared, 'result')} each were compared"]
        if self.first is None:
            said = "every op computed the same each time" if self.compared else "no result could be compared"
            return "\n".join([*lines, f"{self.outcome}: {said}"])
        first = self.first
        scope = f", scope {first.scope}" if first.scope else ""
        lines += [
            f"{self.outcome}: ordinal {first.ordinal} ({first.kernel}{scope}) is the first that differs from itself",
            f"  call: {first.call}",
            f"  how often: {first.variants} different results; {_named(first.replays)} of {self.replays} "
            f"{'differs' if len(first.replays) == 1 else 'differ'} from most",
        ]
        lines += [f"  elements: {first.distance}"] if first.distance is not None else []
        for each in self.others[:_SHOWN]:
            lines.append(f"  then: ordinal {each.ordinal} ({each.kernel}), {_named(each.replays)}")
        if len(self.others) > _SHOWN:
            lines.append(f"  and {len(self.others) - _SHOWN:,} more ops behind it")
        return "\n".join(printable(line, 2000) for line in lines)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        head = {
            "kind": "repeated",
            **{name: getattr(self, name) for name in ("path", "outcome", "replays", "processes", "compared")},
            "first": None if self.first is None else self.first.ordinal,
        }
        found = () if self.first is None else (self.first, *self.others[:_MOST_ROWS])
        return head, *(_row(each) for each in found)

    def __str__(self) -> str:
        return self.text


def _named(replays: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, replays[:_SHOWN]))
    return f"replay{'s' if len(replays) > 1 else ''} {shown}{', …' if len(replays) > _SHOWN else ''}"


def _row(each: Unsteady) -> dict[str, Any]:
    row = {"kind": "unsteady", **vars(each), "replays": list(each.replays)}
    return row | {"distance": None if each.distance is None else distance_json(each.distance)}


def repeat(path: str | PathLike[str], times: int = 10, *, processes: bool = False, **options: Any) -> Repeated:
    """Replay a capture `times` times and compare the replays, as `opreplay-run --repeat` does; with `processes` each in
    a fresh process. `options` are those of a Plan; with `processes` of plain values.

    Raises UsageError, and what a replay raises.
    """
    if not processes:
        from replayfmt.replay.plan import Plan
        from replayfmt.trim.recorded import record_plan

        with Plan(path, **options) as plan:
            return repeat_by(
                fspath(path), times, lambda out: record_plan(plan, out, digests="ops", content=False), processes=False
            )
    try:
        given = json.dumps(options)
    except TypeError as error:
        raise UsageError(f"processes=True: a fresh process can only be given plain options: {error}") from None
    command = [sys.executable, "-c", _IN_A_PROCESS, fspath(path)]
    return repeat_by(
        fspath(path), times, lambda out: run_process([*command, out, given, json.dumps(sys.path)], out), processes=True
    )


def run_process(command: list[str], out: str) -> None:
    """Run what records a replay in a process. Raises ReplayFailed with what it said if it did not."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not Path(out).exists():  # a replay that differs from its capture has another exit code, too
        said = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise ReplayFailed(f"a replay in a fresh process failed: {printable(said, 1000)}")


def repeat_by(path: str, times: int, record: Callable[[str], object], *, processes: bool) -> Repeated:
    """Compare `times` replays that `record` records, each in the file it is given."""
    if times < 2:
        raise UsageError(f"--repeat={times}: expected at least 2 replays, to compare them")
    with tempfile.TemporaryDirectory(prefix="opreplay-") as folder:
        first = _recorded(Path(folder, "1.opreplay"), record)
        apart: Side | None = None  # the replay that shows the earliest difference, with that
        earliest: tuple[int, int] | None = None
        hashes: dict[int, dict[int, int]] = {}  # by observation of the first replay, of each replay that differs there
        compared = 0
        for number in range(2, times + 1):
            other = _recorded(Path(folder, f"{number}.opreplay"), record)
            observed, compared = differing(first.trace, other.trace, align_recorded(first.trace, other.trace))
            for one, its in observed:
                hashes.setdefault(one, {})[number] = int(other.trace.observed_hash[its])
            if observed and (earliest is None or first.trace.observed_op[observed[0][0]] < _op(first, earliest)):
                if apart is not None:
                    _forget(apart)
                apart, earliest = other, observed[0]
            else:
                _forget(other)
        ops: dict[int, Unsteady] = {}
        for one, seen in sorted(hashes.items(), key=lambda each: int(first.trace.observed_op[each[0]])):
            op = int(first.trace.observed_op[one])
            if op >= 0 and op not in ops:
                far = None
                if apart is not None and earliest is not None and op == _op(first, earliest):
                    far = observed_distance(first, apart, *earliest, Tolerance("exact"))
                ops[op] = _unsteady(first, one, seen, times, far)
        found = list(ops.values())
        for side in (first, apart):
            if side is not None:
                side.reader.close()
        return Repeated(path, times, processes, compared, found[0] if found else None, tuple(found[1:]))


def _recorded(file: Path, record: Callable[[str], object]) -> Side:
    record(str(file))
    reader = open_capture(file)
    return Side(reader, read_trace(reader))


def _forget(side: Side) -> None:
    side.reader.close()
    Path(side.reader.path).unlink()


def _op(side: Side, observed: tuple[int, int]) -> int:
    return int(side.trace.observed_op[observed[0]])


def _unsteady(first: Side, one: int, seen: dict[int, int], times: int, far: Distance | None) -> Unsteady:
    own = int(first.trace.observed_hash[one])
    shown = {number: seen.get(number, own) for number in range(1, times + 1)}
    counts = Counter(shown.values())
    most = counts.most_common(1)[0][0]
    op = int(first.trace.observed_op[one])
    return Unsteady(
        first.ordinal(op),
        first.kernel(op),
        first.scope(op),
        first.call(op),
        tuple(number for number, value in shown.items() if value != most),
        len(counts),
        far,
    )
