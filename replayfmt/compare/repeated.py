"""Is a capture's work deterministic? Replays of one capture, compared with each other op by op.

Each replay is recorded (`record_plan`) in a folder for temporary files, without content, and only what is needed to
compare stays. The first op whose results differ had the same inputs each time, since everything before it is
equal: it differs from itself, or one device computes something else than others of its kind do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.format.reader import open_capture
from replayfmt.format.validation import counted, printable
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.devices import device_groups
from replayfmt.trim.recorded import record_plan

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
    them do, or all that do not show what the first does if no result is that of most; `variants` how many different
    results there are; `distance` is between two of them. `devices` are those that compute the same each time, and not
    what most devices do; none if it differs from itself on one device."""

    ordinal: int
    kernel: str
    scope: str
    call: str
    replays: tuple[int, ...]
    variants: int
    distance: Distance | None = None
    majority: bool = True  # more than half of the replays agree
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """Replays of one capture. `first` is the first op that differs from itself, None if none does; `others` are the ops
    that differ, too, most of them because they depend on it. `compared` counts the results of one replay. Replays were
    on `devices` in turn, if it was more than one; `models` are their names. Prints as what `opreplay-run --repeat`
    prints."""

    path: str
    replays: int
    processes: bool
    compared: int
    first: Unsteady | None
    others: tuple[Unsteady, ...] = ()
    devices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.first is None and self.compared > 0

    @property
    def outcome(self) -> str:
        if self.first is not None:
            return "devices differ" if self.first.devices else "nondeterministic"
        return "deterministic" if self.ok else "not compared"

    @property
    def text(self) -> str:
        where = f" on {', '.join(self.devices)} in turn" if self.devices else ""
        how = f"{counted(self.replays, 'replay')}{where}{', each in a fresh process' if self.processes else ''}"
        lines = [self.path, f"repeated: {how}, of which {counted(self.compared, 'result')} each were compared"]
        if self.first is None:
            said = "every op computed the same each time" if self.compared else "no result could be compared"
            return "\n".join([*lines, f"{self.outcome}: {said}"])
        first = self.first
        scope = f", scope {first.scope}" if first.scope else ""
        what = "from itself" if not first.devices else "between devices"
        most = "most" if first.majority else "the first, and no result is that of most"
        lines += [
            f"{self.outcome}: ordinal {first.ordinal} ({first.kernel}{scope}) is the first that differs {what}",
            f"  call: {first.call}",
            f"  how often: {first.variants} different results; {_named(first.replays)} of {self.replays} "
            f"{'differs' if len(first.replays) == 1 else 'differ'} from {most}",
        ]
        if first.devices:
            lines.append(f"  devices: {self._blamed(first)}")
        lines += [f"  elements: {first.distance}"] if first.distance is not None else []
        for each in self.others[:_SHOWN]:
            lines.append(f"  then: ordinal {each.ordinal} ({each.kernel}), {_named(each.replays)}")
        if len(self.others) > _SHOWN:
            lines.append(f"  and {len(self.others) - _SHOWN:,} more ops behind it")
        return "\n".join(printable(line, 2000) for line in lines)

    def _blamed(self, first: Unsteady) -> str:
        """Which device computes something else than the others, and whether that is a fault of it."""
        named = ", ".join(first.devices)
        if len(set(self.models)) > 1:
            return f"{named} against the others, which are of other models ({', '.join(self.models)}), and may round so"
        if first.majority:
            return f"{named} computes the same each time, and not what the others do, which are of the same model"
        return "each computes the same each time; with three or more of them it would be seen which one is off"

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        head = {
            "kind": "repeated",
            **{name: getattr(self, name) for name in ("path", "outcome", "replays", "processes", "compared")},
            "devices": list(self.devices),
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
    row = {"kind": "unsteady", **vars(each), "replays": list(each.replays), "devices": list(each.devices)}
    return row | {"distance": None if each.distance is None else distance_json(each.distance)}


def repeat(path: str | PathLike[str], times: int = 10, *, processes: bool = False, **options: Any) -> Repeated:
    """Replay a capture `times` times and compare the replays, as `opreplay-run --repeat` does; with `processes` each in
    a fresh process. `options` are those of a Plan, with `processes` of plain values. `devices` may be more than the
    capture needs: then it is replayed that often on each of them, or on each group of as many as it needs.

    Raises UsageError, and what a replay raises.
    """
    groups = groups_of(path, options.pop("devices", ()))
    if not processes:
        return repeat_here(fspath(path), times, groups, lambda devices: Plan(path, devices=devices, **options))
    ways: dict[str, Callable[[str], object]] = {}
    for group in groups:
        try:
            given = json.dumps(options | {"devices": list(group)})
        except TypeError as error:
            raise UsageError(f"processes=True: a fresh process can only be given plain options: {error}") from None
        command = [sys.executable, "-c", _IN_A_PROCESS, fspath(path)]

        def record(out: str, command: Sequence[str] = command, given: str = given) -> None:
            run_process([*command, out, given, json.dumps(sys.path)], out)

        ways["+".join(group)] = record
    return repeat_by(fspath(path), times, ways, processes=True)


def groups_of(path: str | PathLike[str], devices: Sequence[str]) -> list[tuple[str, ...]]:
    """The devices in groups, each of as many as a capture needs: one replay can run on each."""
    with open_capture(path) as reader:
        return device_groups(reader.devices, devices)


def repeat_here(
    path: str, times: int, groups: Sequence[tuple[str, ...]], plan: Callable[[tuple[str, ...]], Plan]
) -> Repeated:
    """Compare replays in this process; `plan` makes the plan for a group of devices."""
    with ExitStack() as stack:
        ways: dict[str, Callable[[str], object]] = {}
        for group in groups:
            made = stack.enter_context(plan(group))
            ways["+".join(group)] = partial(record_plan, made, digests="ops", content=False)
        return repeat_by(path, times, ways, processes=False)


def run_process(command: list[str], out: str) -> None:
    """Run what records a replay in a process. Raises ReplayFailed with what it said if it did not."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not Path(out).exists():  # a replay that differs from its capture has another exit code, too
        said = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise ReplayFailed(f"a replay in a fresh process failed: {printable(said, 1000)}")


def repeat_by(path: str, times: int, ways: Mapping[str, Callable[[str], object]], *, processes: bool) -> Repeated:
    """Compare replays that `ways` record, each in the file it is given and `times` times, in turn; by their devices."""
    total, names = times * len(ways), list(ways)
    if total < 2:
        raise UsageError(f"--repeat={times}: expected at least 2 replays, to compare them")
    with tempfile.TemporaryDirectory(prefix="opreplay-") as folder:
        first = _recorded(Path(folder, "1.opreplay"), ways[names[0]])
        models = [_models(first)]
        apart: Side | None = None  # the replay that shows the earliest difference, with that
        earliest: tuple[int, int] | None = None
        hashes: dict[int, dict[int, int]] = {}  # by observation of the first replay, of each replay that differs there
        compared = 0
        for number in range(2, total + 1):
            other = _recorded(Path(folder, f"{number}.opreplay"), ways[names[(number - 1) % len(names)]])
            if number <= len(names):
                models.append(_models(other))
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
        with open_capture(path) as reader:  # a replay's recording numbers its records anew
            ordinals = reader.op_ordinals().tolist() if hashes else []
        for one, seen in sorted(hashes.items(), key=lambda each: int(first.trace.observed_op[each[0]])):
            op = int(first.trace.observed_op[one])
            if op >= 0 and op not in ops:
                far = None
                if apart is not None and earliest is not None and op == _op(first, earliest):
                    far = observed_distance(first, apart, *earliest, Tolerance("exact"))
                ops[op] = replace(_unsteady(first, one, seen, total, names, far), ordinal=ordinals[op])
        found = list(ops.values())
        for side in (first, apart):
            if side is not None:
                side.reader.close()
        several = (tuple(names), tuple(models)) if len(names) > 1 else ((), ())
        return Repeated(path, total, processes, compared, found[0] if found else None, tuple(found[1:]), *several)


def _models(side: Side) -> str:
    """The names of the devices of a replay."""
    devices = [each for each in side.reader.devices if each is not None]
    used = [each for each in devices if each.is_accelerator] or devices
    return ", ".join(each.name or each.kind for each in used)


def _recorded(file: Path, record: Callable[[str], object]) -> Side:
    record(str(file))
    reader = open_capture(file)
    return Side(reader, read_trace(reader))


def _forget(side: Side) -> None:
    side.reader.close()
    Path(side.reader.path).unlink()


def _op(side: Side, observed: tuple[int, int]) -> int:
    return int(side.trace.observed_op[observed[0]])


def _unsteady(
    first: Side, one: int, seen: dict[int, int], times: int, names: Sequence[str], far: Distance | None
) -> Unsteady:
    own = int(first.trace.observed_hash[one])
    shown = {number: seen.get(number, own) for number in range(1, times + 1)}
    counts = Counter(shown.values())
    most, count = counts.most_common(1)[0]
    majority = 2 * count > times
    usual = most if majority else own
    on = {name: {shown[number] for number in shown if names[(number - 1) % len(names)] == name} for name in names}
    steady = len(names) > 1 and all(len(each) == 1 for each in on.values())
    op = int(first.trace.observed_op[one])
    return Unsteady(
        first.ordinal(op),
        first.kernel(op),
        first.scope(op),
        first.call(op),
        tuple(number for number, value in shown.items() if value != usual),
        len(counts),
        far,
        majority,
        tuple(name for name in names if on[name] != {usual}) if steady else (),
    )
