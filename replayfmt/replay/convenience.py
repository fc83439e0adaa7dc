"""A replay in one call with its report, one op's values, one op run on its own.

This is what `replayfmt.run(...)`, `op.inputs()`, `op.results()` and `op.replay()` do. `as_text` and `as_rows` are the
report of a finished replay for people and for programs, as opreplay-run prints it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from replayfmt.collector import collector_paused
from replayfmt.errors import (
    ContentNotCaptured,
    InvalidCapture,
    ReplayFailed,
    ReplayMismatch,
    ReplayRefused,
    UsageError,
    optional_library,
)
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.keywords import explained
from replayfmt.format.model import Record
from replayfmt.format.races import judge_races
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.validation import SECONDS, counted, flag_of, in_units, printable, scope_count
from replayfmt.pytorch.environment import replay_threads
from replayfmt.pytorch.tensors.memory import undispatched

from .op_tensors import CapturedValues, replayed_values
from .plan import Plan
from .planning.records import python_values
from .preparation import PlanOptions, ReplayOptions
from .results import Divergence, PeakMemory, ReplayResult, VerifyMode

if TYPE_CHECKING:
    import pandas

_SHOWN_VERDICTS = 20
_SHOWN_INITIALIZERS = 12


def _threads(plan: Plan) -> str:
    """With how many threads, where that is not simply what the capture had."""
    count, why = replay_threads(plan.reader.session.settings.get("num_threads"))
    return f", {counted(count, 'thread')} ({why})" if why else ""


def as_text(plan: Plan, result: ReplayResult, warm: ReplayResult | None = None) -> list[str]:
    """The summary, line by line; `warm` is a later execution, of which only the times are shown."""
    devices = ", ".join(map(str, plan.devices)) or "no device"
    scopes = f" in {scope_count(len(plan.reader.scopes) - 1, result.scopes)}" if result.scopes else ""
    captured = f"{counted(result.ops, 'op')} of {counted(result.kernels, 'kernel')}{scopes}"
    ran = _ran(result)
    if ran is None:
        assert result.divergence is not None
        captured = f"up to ordinal {result.divergence.seen_at}, where it differs, of {captured}"
    elif ran < result.ops:
        captured = f"{ran} of {captured}"
    lines = [
        plan.reader.path,
        f"replayed: {captured}, on {devices}{_threads(plan)}",
        *_left_out(result),
        *_times(result, ran),
        *([] if warm is None else _times(warm, _ran(warm))),
    ]
    lines += _verification(result)
    lines += [f"  not compared: {each}" for each in result.opaque_results]
    lines += [f"  nondeterministic: {each}" for each in result.nondeterministic]
    if plan.substitution is not None and plan.substitution.report is not None:
        lines += plan.substitution.report.as_text()
    for each in result.memory:
        lines += _memory(each)
    lines += _streams(plan)
    races = judge_races(plan.reader)
    lines += [f"races: not all looked for: {races.unjudged}"] if races.unjudged else []
    lines += [f"race: {each}" for each in races.sentences]
    lines += _initialized(plan)
    lines += [f"note: {note}" for note in result.notes]
    if result.verdicts is not None:
        lines.append("verdicts: " + ", ".join(f"{count} {name}" for name, count in result.totals().items()))
        failing = [op for op in result.verdicts if op.verdict != "ok" and op.cause is None]
        following = Counter(op.cause for op in result.verdicts)
        for op in failing[:_SHOWN_VERDICTS]:
            lines.append(f"  ordinal {op.ordinal} ({op.op}): {op.verdict}: {op.reason}")
            if following[op.ordinal]:
                count = counted(following[op.ordinal], "op")
                lines.append(f"    {count} after it differ, on what follows from it; --format=jsonl lists them")
        if len(failing) > _SHOWN_VERDICTS:
            lines.append(f"  and {len(failing) - _SHOWN_VERDICTS} more; --format=jsonl lists all of them")
    return lines


def _times(result: ReplayResult, ran: int | None) -> list[str]:
    """How long it took, and what that includes."""
    per_op = f", {seconds(result.elapsed_ns / ran)} an op" if ran else ""
    state = (
        "cold: the first execution, with allocation and page faults"
        if result.execution == 1
        else f"warm: execution {result.execution}"
    )
    scopes = [f"  {path}: {seconds(spent)}" for path, spent in result.scope_ns.items() if "/" not in path]
    return [f"time: {seconds(result.elapsed_ns)}{per_op} ({state})", *scopes]


def _ran(result: ReplayResult) -> int | None:
    """How many ops ran; None if that was not counted: the replay ended where it first differed."""
    if result.verdicts is not None:
        totals = result.totals()
        return totals["ok"] + totals["mismatched"]
    return result.ops if result.divergence is None else None


def _left_out(result: ReplayResult) -> list[str]:
    """What the capture holds besides ops that was not replayed."""
    records = f"{result.unsupported} unsupported record{'s' if result.unsupported > 1 else ''}"
    lines = [f"not replayed: {records}, whose work cannot be replayed"] if result.unsupported else []
    lines += [f"not in the capture: {each}" for each in result.elsewhere]
    if result.left_out:
        count = len(result.left_out)
        records = f"{count} records other than ops" if count > 1 else "1 record other than an op"
        lines.append(f"not replayed: {records}, first {result.left_out[0]}")
    return lines


def _verification(result: ReplayResult) -> list[str]:
    verification = result.verification
    if verification.mode == "none":
        lines = [f"not verified: {reason}" for reason in verification.reasons]
        compared = verification.scalars or verification.structures
        return [*lines, f"  compared: {verification.compared}"] if compared else lines
    found = {"ok": "verified", "mismatched": "differs", "incomplete": "verified, the part that ran"}
    if result.elsewhere:
        found["ok"] = "verified, without the work of child processes"
    return [
        f"{found[result.outcome]}: {verification.mode}",
        *(f"  why: {reason}" for reason in verification.reasons),
        f"  compared: {verification.compared}",
        *([f"  not compared: {verification.gap}"] if verification.uncompared else []),
        *([f"  {verification.tolerance}"] if verification.tolerance else []),
    ]


def _streams(plan: Plan) -> list[str]:
    """How the capture's streams were replayed."""
    streams = plan.context.streams
    if streams is None:
        return []
    counts = ", ".join(f"{counted(len(streams.of(device)), 'stream')} of {device}" for device in streams.accelerators())
    if streams.captured:
        how = f"{counts}, as captured"
    else:
        how = f"one for each device, in capture order: {streams.problem or '--streams=serial'}"
    return [f"streams: {how}"]


def _initialized(plan: Plan) -> list[str]:
    """What filled storages that were not captured: by initializer and what it is for, the most first."""
    filled = plan.synthesis.initialized
    if not filled:
        return []
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in filled:
        groups[each.initializer, f"{each.argument} of {each.op}" if each.op else "nothing reads it"].append(each.bytes)
    by_count = sorted(groups.items(), key=lambda item: -len(item[1]))
    size = _size(sum(each.bytes for each in filled))
    lines = [f"not captured: content of {counted(len(filled), 'storage')}, {size}, filled by"]
    lines += [
        f"  {name}: {len(lengths)} x {what}, {_size(sum(lengths))}"
        for (name, what), lengths in by_count[:_SHOWN_INITIALIZERS]
    ]
    if len(by_count) > _SHOWN_INITIALIZERS:
        lines.append(f"  and {len(by_count) - _SHOWN_INITIALIZERS} more groups; --format=jsonl lists every storage")
    return lines


@collector_paused()
def as_rows(plan: Plan, result: ReplayResult, warm: ReplayResult | None = None) -> list[dict[str, Any]]:
    """One `replay` row, which has the times of a later execution under `warm`; a `substitution` row for each
    substituted signature, then a `verdict` row for each op where verdicts were requested."""
    verification = result.verification
    divergence = result.divergence
    races = judge_races(plan.reader)
    row: dict[str, Any] = {
        "kind": "replay",
        "path": plan.reader.path,
        "capture_session": plan.reader.session.session_id,
        "outcome": result.outcome,
        "devices": [str(device) for device in plan.devices],
        **{name: getattr(result, name) for name in ("ops", "kernels", "scopes", "elapsed_ns", "scope_ns", "execution")},
        "warm": None
        if warm is None
        else {name: getattr(warm, name) for name in ("execution", "elapsed_ns", "scope_ns")},
        "verification": {**asdict(verification), "reasons": list(verification.reasons)},
        "streams": None
        if plan.context.streams is None
        else ("captured" if plan.context.streams.captured else "serial"),
        "races": races.sentences,
        "races_not_looked_for": races.unjudged or None,
        "divergence": None
        if divergence is None
        else {
            "ordinal": divergence.ordinal,
            "op": divergence.what,
            **{name: getattr(divergence, name) for name in ("result", "scope", "expected", "got")},
            "distance": None if divergence.distance is None else str(divergence.distance),
            "sample": None if divergence.distance is None else asdict(divergence.distance),
            "found_at": divergence.found_at,
            "written_by": divergence.written_by,
            "again": divergence.again,
        },
        "nondeterministic": list(result.nondeterministic),
        "opaque_results": [
            {"op": each.op, "result": each.index, "why": each.why, "calls": each.calls}
            for each in result.opaque_results
        ],
        "memory": [asdict(each) for each in result.memory],
        "notes": list(result.notes),
        "findings": list(plan.findings),
        "unsupported": result.unsupported,
        "elsewhere": list(result.elsewhere),
        "left_out": list(result.left_out),
        "verdicts": result.totals() or None,
    }
    initialized = [
        {
            "kind": "initialized",
            "storage": each.storage,
            "version": each.version,
            "bytes": each.bytes,
            "dtype": str(each.tensor.dtype).removeprefix("torch."),
            "sizes": list(each.tensor.sizes),
            "initializer": each.initializer,
            "op": each.op or None,
            "argument": each.argument if each.op else None,
            "ordinal": each.ordinal if each.op else None,
            "why": each.why or None,
        }
        for each in plan.synthesis.initialized
    ]
    verdicts = [{"kind": "verdict", **asdict(each)} for each in result.verdicts or ()]
    report = None if plan.substitution is None else plan.substitution.report
    return [row, *initialized, *([] if report is None else report.as_rows()), *verdicts]


def seconds(nanoseconds: float) -> str:
    return in_units(nanoseconds, SECONDS)


def _memory(peak: PeakMemory) -> list[str]:
    if peak.peak_bytes is None:
        return [f"peak memory, {peak.device}: not measured: {peak.note}"]
    lines = [f"peak memory, {peak.device}: {_mebibytes(peak.peak_bytes)}, {peak.note}"]
    if peak.before_bytes is not None:
        lines.append(f"  {_mebibytes(max(0, peak.peak_bytes - peak.before_bytes))} more than before the ops")
    return lines


def _size(length: int) -> str:
    return in_units(length, ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")))


def _mebibytes(length: int) -> str:
    return f"{length / 2**20:.1f} MiB"


class ReplayedResults(Mapping[int, Any]):
    """What each op returns in a replay, by ordinal, as its kernel returns it. Nothing is kept: each time that one is
    asked for, the op is replayed, and those before it that it needs."""

    def __init__(self, path: str, options: PlanOptions) -> None:
        self._path, self._options = path, options

    @cached_property
    def _ordinals(self) -> dict[int, None]:
        with open_capture(self._path) as reader:
            return dict.fromkeys(reader.op_ordinals().tolist())

    def __getitem__(self, ordinal: int) -> Any:
        """Raises KeyError if no op has the ordinal, and what `Op.replay` raises."""
        if ordinal not in self._ordinals:
            raise KeyError(ordinal)
        with open_capture(self._path) as reader:
            return replay_op(reader, ordinal, **self._options)

    def __contains__(self, ordinal: object) -> bool:
        return ordinal in self._ordinals

    def __iter__(self) -> Iterator[int]:
        return iter(self._ordinals)

    def __len__(self) -> int:
        return len(self._ordinals)


def frame_of(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a DataFrame. Raises LibraryMissing without pandas."""
    pandas = optional_library("pandas", "to_pandas()", "pip install 'opreplay[pandas]'")
    return pandas.DataFrame(rows)


@dataclass(frozen=True)
class Replayed:
    """A finished replay. `text` is what opreplay-run prints of it, `rows` are the rows of its --format=jsonl; `result`
    has everything as values, `results` what the ops returned, if it was asked for. Prints as the text."""

    path: str
    result: ReplayResult
    text: str
    rows: tuple[dict[str, Any], ...]
    results: ReplayedResults | None = None

    @property
    def outcome(self) -> str:
        """`ok` if the whole capture was replayed and nothing differs; else `mismatched` or `incomplete`."""
        return self.result.outcome

    @property
    def verified(self) -> str:
        """One line: how the results were verified, or why nothing was."""
        return self.result.verified

    @property
    def divergence(self) -> Divergence | None:
        """The first difference from the capture."""
        return self.result.divergence

    @property
    def elapsed_ns(self) -> int:
        """How long the ops took, in nanoseconds."""
        return self.result.elapsed_ns

    def to_pandas(self, kind: str = "replay") -> pandas.DataFrame:
        """The `rows` of one kind: `verdict` with `keep_going`, `substitution` with substitutions. Raises LibraryMissing
        without pandas, and UsageError for a kind of which there is no row."""
        kinds = {str(row["kind"]): None for row in self.rows}
        if kind not in kinds:
            raise UsageError(f"to_pandas({kind!r}): this replay has rows of the kinds {', '.join(kinds)}")
        return frame_of([row for row in self.rows if row["kind"] == kind])

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@explained(PlanOptions, ReplayOptions)
def run(
    path: str | PathLike[str],
    *,
    verify: VerifyMode = "auto",
    keep_going: bool = False,
    check: bool = True,
    results: bool = False,
    **options: Unpack[PlanOptions],
) -> Replayed:
    """Replay a capture and verify the results, as opreplay-run does. `options` are those of Plan. With `results`, the
    replay's `results[ordinal]` is what an op returned, computed when it is asked for.

    Raises ReplayMismatch if the replay differs from the capture, unless `check` is False: then the result says so.
    With `keep_going` everything runs that can, and `result.verdicts` says what became of each op. Raises ReplayRefused
    with every finding, ReplayFailed if an op fails, and what opening the file raises.
    """
    check, results = flag_of("check", check), flag_of("results", results)
    with Plan(path, keep_going=keep_going, **options) as plan:
        result = plan.execute(verify=verify, keep_going=keep_going, scope_times=True)
        text = "\n".join(map(printable, as_text(plan, result)))
        values = ReplayedResults(plan.reader.path, options) if results else None
        replayed = Replayed(plan.reader.path, result, text, tuple(as_rows(plan, result)), values)
    if check and result.divergence is not None:
        raise ReplayMismatch(f"{replayed.path}: the replay differs from the capture: {result.divergence}")
    return replayed


def op_values(reader: CaptureReader, record: Record, *, results: bool, replay: bool, options: PlanOptions) -> list[Any]:
    """What an op takes, or with `results` what it returns: from the capture itself, or with `replay` from a verified
    replay of what comes before.

    Raises ContentNotCaptured if neither has it, InvalidCapture, and with `replay` what a replay raises.
    """
    if results and record.signature.status is not OpStatus.ok:
        raise ContentNotCaptured(
            f"{reader.path}: ordinal {record.ordinal} raised an error under capture, so it has no results"
        )
    if flag_of("replay", replay):
        if options.get("substitutions", ()) not in ((), []):
            raise UsageError("substitutions: an op's values are those of the captured kernels")
        with Plan(reader, keep_going=True, **options) as plan:
            return replayed_values(plan, record.ordinal, results=results)
    odd = sorted(set(options) - {"file_remaps"})
    if odd:
        raise UsageError(f"{', '.join(odd)}: say how to replay; give replay=True, too")
    nodes, values = record.signature.args, record.args
    if results:
        nodes, values = record.signature.results, record.results
    with undispatched(), CapturedValues(reader, options.get("file_remaps", ())) as held:
        held.look(record, results=results)
        return python_values(reader, nodes, values, held.tensor, "result " if results else "")


def arguments_by_name(record: Record, values: Sequence[Any]) -> dict[str, Any]:
    """An op's arguments by name. Raises InvalidCapture if two have the same."""
    found = {node.name: value for node, value in zip(record.signature.args, values, strict=True)}
    if len(found) != len(values):
        raise InvalidCapture(f"ordinal {record.ordinal}: two arguments have one name")
    return found


def replay_op(reader: CaptureReader, ordinal: int, **options: Unpack[PlanOptions]) -> Any:
    """What the kernel of the op at an ordinal returns, replayed with the options of a Plan.

    Raises UsageError if there is no op at the ordinal, ReplayRefused if it or what it needs cannot be run here,
    ReplayFailed if it raises.
    """
    if not 0 <= ordinal < reader.record_count or reader.record(ordinal).kind is not RecordKind.op:
        raise UsageError(f"{reader.path}: there is no op at ordinal {ordinal}")
    options["allow_incomplete"] = True
    with Plan(reader, keep_going=True, **options) as plan:
        verdict, result = plan.run_single(ordinal)
    if verdict.verdict == "ok":
        return result
    message = f"{reader.path}: ordinal {ordinal} ({verdict.op}): {verdict.reason}"
    if verdict.verdict == "failed":
        raise ReplayFailed(message)
    raise ReplayRefused(message, (verdict.reason,))
