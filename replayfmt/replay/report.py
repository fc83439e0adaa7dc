"""A finished replay as text for people and as one row for programs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from replayfmt.format.printable import counted, scope_count
from replayfmt.format.races import judge_races

from .plan import Plan
from .results import PeakMemory, ReplayResult

_SHOWN_VERDICTS = 20
_SHOWN_INITIALIZERS = 12


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
        f"replayed: {captured}, on {devices}",
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
        failing = [each for each in result.verdicts if each.verdict != "ok"]
        lines += [
            f"  ordinal {each.ordinal} ({each.op}): {each.verdict}: {each.reason}" for each in failing[:_SHOWN_VERDICTS]
        ]
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
        "ops": result.ops,
        "kernels": result.kernels,
        "scopes": result.scopes,
        "elapsed_ns": result.elapsed_ns,
        "scope_ns": result.scope_ns,
        "execution": result.execution,
        "warm": None
        if warm is None
        else {"execution": warm.execution, "elapsed_ns": warm.elapsed_ns, "scope_ns": warm.scope_ns},
        "verification": {
            "asked": verification.asked,
            "mode": verification.mode,
            "reasons": list(verification.reasons),
            "digests": verification.digests,
            "host_reads": verification.host_reads,
            "scalars": verification.scalars,
            "structures": verification.structures,
            "inexact": verification.inexact,
            "tolerances": verification.tolerances,
        },
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
            "result": divergence.result,
            "scope": divergence.scope,
            "expected": divergence.expected,
            "got": divergence.got,
            "distance": divergence.distance,
            "found_at": divergence.found_at,
        },
        "nondeterministic": list(result.nondeterministic),
        "opaque_results": [
            {"op": each.op, "result": each.index, "why": each.why, "calls": each.calls}
            for each in result.opaque_results
        ],
        "memory": [
            {"device": each.device, "peak_bytes": each.peak_bytes, "before_bytes": each.before_bytes, "note": each.note}
            for each in result.memory
        ],
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
    verdicts = [
        {"kind": "verdict", "ordinal": each.ordinal, "op": each.op, "verdict": each.verdict, "reason": each.reason}
        for each in result.verdicts or ()
    ]
    report = None if plan.substitution is None else plan.substitution.report
    return [row, *initialized, *([] if report is None else report.as_rows()), *verdicts]


def seconds(nanoseconds: float) -> str:
    """A duration with a unit that fits."""
    for limit, unit, size in ((1_000, "ns", 1), (1_000_000, "us", 1e3), (1_000_000_000, "ms", 1e6)):
        if nanoseconds < limit:
            return f"{nanoseconds / size:.4g} {unit}"
    return f"{nanoseconds / 1e9:.4g} s"


def _memory(peak: PeakMemory) -> list[str]:
    if peak.peak_bytes is None:
        return [f"peak memory, {peak.device}: not measured: {peak.note}"]
    lines = [f"peak memory, {peak.device}: {_mebibytes(peak.peak_bytes)}, {peak.note}"]
    if peak.before_bytes is not None:
        lines.append(f"  {_mebibytes(max(0, peak.peak_bytes - peak.before_bytes))} more than before the ops")
    return lines


def _size(length: int) -> str:
    for limit, unit, size in ((1 << 10, "bytes", 1), (1 << 20, "KiB", 1 << 10), (1 << 30, "MiB", 1 << 20)):
        if length < limit:
            return f"{length / size:.4g} {unit}"
    return f"{length / (1 << 30):.4g} GiB"


def _mebibytes(length: int) -> str:
    return f"{length / 2**20:.1f} MiB"
