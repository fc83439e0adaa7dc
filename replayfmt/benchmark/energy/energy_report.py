"""The report of a measurement of energy: the whole model, single kernels added up, and the two compared.

Energy per call is the energy of a window divided by its runs. If the work overwrites its inputs, the energy of
restoring them, measured in a window of its own, is subtracted, and both errors are added. The prediction of the whole
sums, over measured kernels, calls times joules a call; what was not measured is estimated from its time, and kept
apart. Where a log has energy counters, joules are theirs, and what the trapezoid rule makes of the sampled power stands
beside them (`joules_from_power`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from replayfmt.errors import UsageError
from replayfmt.format.validation import counted, in_units, printable

from ..machine import gpu_caveats, gpu_lines
from ..statistics import duration
from .power_log import PowerLog
from .windows import LEAST_SAMPLES, Energy, EnergyWindow, Role, WindowsFile, find_clock_offset, integrate, method_of


def joules_text(value: float) -> str:
    return in_units(value, ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ")))


def _figure(title: str, part: dict[str, Any], name: str = "") -> str:
    if part["joules"] is None:
        return printable(f"{title:<12}not measured: {part['reason']}{name}")
    each, back = part["joules_per_run"], part.get("restoring_joules_per_run")
    per_run = ""
    if each is not None:
        less = "" if back is None else f" (and {joules_text(back)} of putting back what it writes)"
        per_run = f"{joules_text(each)} a run{less}, {counted(part['runs'], 'run')}, "
    elif part["runs"]:
        per_run = printable(f"a run not measured: {part['reason']}; {counted(part['runs'], 'run')}, ")
    return (
        f"{title:<12}{per_run}{joules_text(part['joules'])} (+-{joules_text(part['error_joules'])}) in "
        f"{duration(part['seconds'] * 1e9)}, {part['mean_watts']:.4g} W, {part['samples']} samples"
        + (
            ""
            if part["joules_from_power"] is None
            else f"; {joules_text(part['joules_from_power'])} from sampled power"
        )
        + printable(name)
    )


# Raised when a required field is added, goes away, or comes to mean something else. Readers refuse other versions: the
# windows and the log make a new report.
SCHEMA_VERSION = 2
# Between a counter and the integral of sampled power, beyond what their errors explain.
_DIFFERS = 0.05
_LESS = "; less putting back what it writes, measured apart"


@dataclass(frozen=True)
class EnergyReport:
    """The report as a JSON object: see docs/power.md, and docs/energy.schema.json."""

    content: dict[str, Any]

    def json(self) -> str:
        return json.dumps(self.content, indent=2, allow_nan=False) + "\n"

    def lines(self, top: int = 20) -> Iterator[str]:
        """A table for people, with the `top` kernels that take the most."""
        content = self.content
        log = content["power_log"]
        left_out = ", ".join(f"{count} {reason}" for reason, count in log["left_out"].items()) or "none"
        yield printable(
            f"power log   {log['path']}: GPU {', '.join(log['gpus'])}, {log['rows']} rows, "
            + ("a single sample" if log["interval_s"] is None else f"every {log['interval_s'] * 1e3:.4g} ms")
            + ", "
            + ("no power" if log["resolution_w"] is None else f"steps of {log['resolution_w']:.4g} W")
            + f"; left out: {left_out}"
        )
        if log.get("other_columns"):
            others = ", ".join(log["other_columns"])
            yield printable(f"            power is that of the column {log['column']}, not of {others}")
        if log["source"] is not None:
            yield printable(f"source      {log['source']}")
        yield f"method      {content['method']}"
        if log["out_of_order"]:
            yield f"            {log['out_of_order']} rows were not in the order of time and were sorted"
        if log["same_time"]:
            yield (
                f"            {log['same_time']} rows have the time of another row of their GPU: what has one time is "
                "one sample, their mean"
            )
        yield f"clock       {log['clock']}"
        yield from (printable(f"gpu         {text}") for text in gpu_lines(content["context"].get("gpus", [])))
        for key, title in (("idle", "idle"), ("whole_model", "whole model"), ("program", "program")):
            if content[key] is not None:
                yield _figure(title, content[key])
        for each in content["scopes"]:
            yield _figure("scope", each, f"  {each['name']}")
        isolated = content["isolated_kernels"]
        yield (
            f"isolated    {isolated['measured']} of {isolated['distinct']} distinct kernels measured, "
            f"{isolated['unmeasurable']} unmeasurable, {isolated['not_run']} not run"
            + (
                ""
                if isolated["share_of_calls"] is None
                else f"; they are {isolated['share_of_calls']:.1%} of the calls"
            )
        )
        if isolated["predicted_joules_per_run"] is not None:
            yield (
                f"predicted   {joules_text(isolated['predicted_joules_per_run'])} a run from the measured kernels "
                f"(+-{joules_text(isolated['predicted_error_joules'])})"
            )
        if isolated["estimated_joules_of_the_rest"] is not None:
            yield f"            {joules_text(isolated['estimated_joules_of_the_rest'])} a run estimated for the others"
        comparison = content["comparison"]
        if comparison["ratio"] is None:
            yield f"comparison  not measured: {comparison['reason']}"
        else:
            yield (
                f"comparison  whole {joules_text(comparison['whole_joules_per_run'])}, predicted "
                f"{joules_text(comparison['predicted_joules_per_run'])}: {comparison['error_percent']:+.1f}%, ratio "
                f"{comparison['ratio']:.3f}"
            )
            if abs(comparison["error_joules"]) <= comparison["error_bound_joules"]:
                bound = joules_text(comparison["error_bound_joules"])
                yield f"            the errors explain that: +-{bound} together"
            if (between := comparison["idle_joules_between_kernels"]) is not None:
                whole, apart = (content[key]["seconds_per_run"] * 1e9 for key in ("whole_model", "isolated_kernels"))
                yield (
                    f"            a run takes {duration(whole)}, its kernels one by one {duration(apart)}: the rest of "
                    f"the time at idle power is {joules_text(between)}, which the whole alone holds"
                )
        for name, part in content["by_class"].items():
            yield printable(
                f"class       {name}: {joules_text(part['joules_per_run'])} a run, {counted(part['calls'], 'call')}"
            )
        measured = [each for each in content["kernels"] if each["joules_per_call"] is not None]
        for each in sorted(measured, key=lambda kernel: -kernel["joules_per_run"])[:top]:
            yield printable(
                f"kernel      {joules_text(each['joules_per_run'])} a run = {each['count']} x "
                f"{joules_text(each['joules_per_call'])} (+-{joules_text(each['error_joules_per_call'])}), "
                f"{duration(each['seconds_per_call'] * 1e9)}, {each['samples']} samples  {each['name']}"
            )
        for each in content["kernels"]:
            if each["joules_per_call"] is None:
                yield printable(f"unmeasured  {each['name']}: {each['reason']}")
        yield from (f"WARNING: {printable(text)}" for text in content["warnings"])


def make_energy_report(
    windows: WindowsFile,
    log: PowerLog,
    *,
    offset_s: float | None = None,
    averaging_s: float | None = None,
    source: str | None = None,
    warnings: Sequence[str] = (),
    least_samples: int = LEAST_SAMPLES,
) -> EnergyReport:
    """Integrate a log over windows. `offset_s` is added to the log's times; None finds it from the first rise of power;
    `source` says where the log is from, `warnings` what is known against it. A window of fewer than `least_samples` has
    no joules.

    Raises UsageError if the log and the windows do not overlap, or the offset cannot be found.
    """
    how = "the log's own, as it is"
    if offset_s is None:
        offset_s = find_clock_offset(log, *_idle_and_load(windows))
        how = f"{offset_s:+.3f} s added to the log's times, found from the rise from idle to load"
    elif offset_s:
        how = f"{offset_s:+.3f} s added to the log's times, as given"
    if log.zone:
        how += f"; times without a zone are taken for {log.zone}"
    if log.whole_seconds:
        how += "; its times are whole seconds: each counts as the middle of its second, and +- allows for half a second"
    shifted = log.shifted(offset_s)
    _require_overlap(windows, shifted)
    found = {id(window): integrate(shifted, window.start_s, window.end_s, least_samples) for window in windows.windows}
    alone = shifted.power_alone()
    powers = {
        id(window): None if alone is None else integrate(alone, window.start_s, window.end_s, least_samples)
        for window in windows.windows
    }
    method = method_of(log)
    gpus = windows.context.get("gpus", [])  # files of earlier versions say nothing of them

    by_role: dict[str, list[EnergyWindow]] = {}
    for window in windows.windows:
        by_role.setdefault(window.role, []).append(window)
    # Putting back is measured right after the work that needs it.
    in_order = sorted(windows.windows, key=lambda each: each.start_monotonic_ns)
    restores = {
        id(before): (after, found[id(after)])
        for before, after in pairwise(in_order)
        if after.role == "restore" and after.name == before.name
    }
    kernels = [_kernel(window, found[id(window)], restores.get(id(window)), method) for window in by_role.get("op", ())]
    kernels += [_kernel(*_without_window("op", each), None, "not run") for each in windows.not_run if not _scope(each)]
    scopes = [_without_window("scope", each) for each in windows.not_run if _scope(each)]

    def parts(role: Role) -> list[dict[str, Any]]:
        return [
            _part(window, found[id(window)], powers[id(window)], method, restores.get(id(window)))
            for window in by_role.get(role, ())
        ]

    idle, whole, program = (next(iter(parts(role)), None) for role in ("idle", "whole", "program"))
    isolated = _isolated(kernels)
    gaps = sum(each.gaps > 0 for each in found.values())
    warnings = [*warnings]
    short = sum(each.joules is not None and each.samples < LEAST_SAMPLES for each in found.values())
    if short:
        warnings.append(
            f"--min-samples={least_samples}: {counted(short, 'window')} count that have fewer than {LEAST_SAMPLES} "
            "samples; what happened between samples is a guess there"
        )
    if gaps:
        verb = "has" if gaps == 1 else "have"
        warnings.append(f"{counted(gaps, 'window')} {verb} gaps in the power log, of more than three intervals")
    warnings += [*_disagreement(whole), *gpu_caveats(gpus)]
    distinct, selected = windows.context.get("distinct_ops"), windows.context.get("selected_ops")
    if partial := isinstance(distinct, int) and isinstance(selected, int) and selected < distinct:
        warnings.append(
            f"only {selected} of {distinct} distinct ops were selected: the prediction covers these, not the whole"
        )
    shortest = min((window.seconds for window in windows.windows), default=0.0)
    if averaging_s is not None and shortest < averaging_s:
        warnings.append(
            f"the source averages power over {averaging_s:g} s, more than the shortest window, {shortest:.3g} s: use "
            "longer windows"
        )
    return EnergyReport(
        {
            "schema_version": SCHEMA_VERSION,
            "context": windows.context,
            "method": method,
            "power_log": {
                "path": log.path,
                "source": source,
                "gpus": log.gpus,
                "counters": list(log.counters),
                **{name: getattr(log, name) for name in ("rows", "left_out", "out_of_order", "same_time")},
                "column": log.column or None,
                "other_columns": list(log.others),
                "interval_s": log.interval_s,
                "resolution_w": log.resolution_w,
                "averaging_s": averaging_s,
                "clock_offset_s": offset_s,
                "clock": how,
                "whole_seconds": log.whole_seconds,
            },
            "idle": idle,
            "whole_model": whole,
            "program": program,
            "scopes": parts("scope") + [_part(window, energy, None, method) for window, energy in scopes],
            "isolated_kernels": isolated,
            "comparison": _comparison(whole, isolated, None if partial else idle),
            "by_class": _by_class(kernels),
            "kernels": kernels,
            "warnings": warnings,
        }
    )


def _idle_and_load(windows: WindowsFile) -> tuple[tuple[float, float], tuple[float, float]]:
    for idle, load in zip(windows.windows, windows.windows[1:], strict=False):
        if idle.role == "idle":
            return (idle.start_s, idle.end_s), (load.start_s, load.end_s)
    raise UsageError("the windows hold no rise from idle to load: give --clock-offset=SECONDS")


def _require_overlap(windows: WindowsFile, log: PowerLog) -> None:
    if not windows.windows:
        raise UsageError("the file of windows holds none: there is nothing to integrate over")
    first, last = min(each.start_s for each in windows.windows), max(each.end_s for each in windows.windows)
    if log.ends_s <= first or log.begins_s >= last:
        apart = first - log.ends_s if log.ends_s <= first else last - log.begins_s
        raise UsageError(
            f"{log.path}: the power log and the windows do not overlap, they are {abs(apart):.3f} s apart: is it "
            "another log, another --zone, or does its clock need --clock-offset=SECONDS?"
        )


def _disagreement(whole: dict[str, Any] | None) -> list[str]:
    """A warning if the counter and the sampled power do not tell the same."""
    if whole is None or whole["joules"] is None or whole["joules_from_power"] is None:
        return []
    apart = abs(whole["joules_from_power"] - whole["joules"])
    if apart <= max(_DIFFERS * whole["joules"], whole["error_joules"]):
        return []
    return [
        f"the energy counter says {joules_text(whole['joules'])} for the whole model, the sampled power "
        f"{joules_text(whole['joules_from_power'])}: one of them does not fit the other's time or device"
    ]


# The window of putting back what the work of another one writes, and its energy.
_Restoring = tuple[EnergyWindow, Energy]


class _PerRun(NamedTuple):
    """What one run, or call, takes; None, with the reason, if that is not known. `restoring` joules of putting back
    were subtracted."""

    joules: float | None = None
    error: float | None = None
    seconds: float | None = None
    restoring: float | None = None
    reason: str | None = None


def _per_run(window: EnergyWindow, energy: Energy, restoring: _Restoring | None) -> _PerRun:
    """A run's part of a window, less putting back."""
    if not window.runs:
        why = energy.reason or ("" if window.role == "idle" else "its window holds no run of it")
        return _PerRun(reason=why or None)
    seconds = energy.seconds / window.runs
    if energy.joules is None or energy.error is None:
        return _PerRun(seconds=seconds, reason=energy.reason)
    joules, error = energy.joules / window.runs, energy.error / window.runs
    if restoring is None:
        return _PerRun(joules, error, seconds)
    back, runs = restoring[1], restoring[0].runs
    if back.joules is None or back.error is None or not runs:
        return _PerRun(seconds=seconds, reason=f"putting back what it writes could not be measured: {back.reason}")
    joules, error, seconds = joules - back.joules / runs, error + back.error / runs, seconds - back.seconds / runs
    if joules <= error or seconds <= 0:
        why = (
            f"putting back what it writes takes as much: {joules:.3g} J and {seconds:.3g} s remain for each, "
            f"+-{error:.3g} J"
        )
        return _PerRun(None, None, seconds if seconds > 0 else None, back.joules / runs, why)
    return _PerRun(joules, error, seconds, back.joules / runs)


def _row(window: EnergyWindow, energy: Energy, a_run: _PerRun, method: str, less: bool) -> dict[str, Any]:
    """What is said of every window. `less`: putting back was measured."""
    return {
        "name": window.name,
        "runs": window.runs,
        "samples": energy.samples,
        "gaps": energy.gaps,
        "mean_watts": energy.watts,
        "method": f"{method}{_LESS}" if less else method,
        "reason": a_run.reason,
    }


def _part(
    window: EnergyWindow, energy: Energy, power: Energy | None, method: str, restoring: _Restoring | None = None
) -> dict[str, Any]:
    """Idle, the whole model, a scope or the program."""
    a_run = _per_run(window, energy, restoring)
    return _row(window, energy, a_run, method, restoring is not None) | {
        "joules": energy.joules,
        "error_joules": energy.error,
        "joules_from_power": None if power is None else power.joules,
        "joules_per_run": a_run.joules,
        "error_joules_per_run": a_run.error,
        "restoring_joules_per_run": a_run.restoring,
        "seconds_per_run": a_run.seconds,
        "seconds": energy.seconds,
    }


def _kernel(window: EnergyWindow, energy: Energy, restoring: _Restoring | None, method: str) -> dict[str, Any]:
    a_call = _per_run(window, energy, restoring)
    return _row(window, energy, a_call, method, restoring is not None) | {
        "kernel": window.kernel,
        "class": window.kernel_class,
        "count": window.count,
        "seconds_per_call": a_call.seconds,
        "joules_per_call": a_call.joules,
        "error_joules_per_call": a_call.error,
        "joules_per_run": None if a_call.joules is None else a_call.joules * window.count,
    }


def _scope(not_run: dict[str, Any]) -> bool:
    return not_run.get("role") == "scope"


def _without_window(role: Role, not_run: dict[str, Any]) -> tuple[EnergyWindow, Energy]:
    """Of work that failed, was refused, or that no replay does: no run of it, and why."""
    name, kernel = str(not_run.get("name")), str(not_run.get("kernel", ""))
    window = EnergyWindow(role, name, 0, 0, 0, 0, 0, int(not_run.get("count", 0)), kernel)
    return window, Energy(None, None, 0.0, 0, 0, str(not_run["reason"]))


def _isolated(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [each for each in kernels if each["joules_per_call"] is not None]
    rest = [each for each in kernels if each["joules_per_call"] is None]
    calls = sum(each["count"] for each in kernels)
    predicted = sum(each["joules_per_run"] for each in measured) if measured else None
    timed = [each for each in kernels if each["seconds_per_call"] is not None]
    seconds = sum(each["count"] * each["seconds_per_call"] for each in timed)
    covered = sum(each["count"] * each["seconds_per_call"] for each in measured)
    untimed = [each for each in rest if each["seconds_per_call"] is None]
    estimable = len(untimed) < len(rest) and predicted is not None and covered > 0
    return {
        "distinct": len(kernels),
        "measured": len(measured),
        "unmeasurable": len([each for each in rest if each["runs"]]),
        "not_run": len([each for each in rest if not each["runs"]]),
        "predicted_joules_per_run": predicted,
        "predicted_error_joules": sum(e["error_joules_per_call"] * e["count"] for e in measured) if measured else None,
        "estimated_joules_of_the_rest": predicted / covered * (seconds - covered) if estimable else None,
        "seconds_per_run": seconds if len(timed) == len(kernels) else None,
        "without_estimate": sum(each["count"] for each in untimed),
        "share_of_calls": sum(each["count"] for each in measured) / calls if calls else None,
        "share_of_time": covered / seconds if seconds > 0 else None,
    }


def _comparison(whole: dict[str, Any] | None, isolated: dict[str, Any], idle: dict[str, Any] | None) -> dict[str, Any]:
    whole_joules = None if whole is None else whole["joules_per_run"]
    predicted = isolated["predicted_joules_per_run"]
    found: dict[str, Any] = {
        "whole_joules_per_run": whole_joules,
        "predicted_joules_per_run": predicted,
        "error_joules": None,
        "error_percent": None,
        "ratio": None,
        "error_bound_joules": None,
        "idle_joules_between_kernels": None,
        "reason": None,
    }
    if whole is None or whole_joules is None:
        why = "it has no window" if whole is None else whole["reason"]
        return found | {"reason": f"the whole model was not measured: {why}"}
    if predicted is None:
        return found | {"reason": "no kernel was measured"}
    if whole_joules <= 0:
        return found | {"reason": "the whole model took 0 J, by the log"}
    difference = predicted - whole_joules
    watts = None if idle is None else idle["mean_watts"]
    if watts is not None and isolated["seconds_per_run"] is not None:
        between = whole["seconds_per_run"] - isolated["seconds_per_run"]
        found["idle_joules_between_kernels"] = watts * between if between > 0 else None
    return found | {
        "error_joules": difference,
        "error_percent": difference / whole_joules * 100,
        "ratio": predicted / whole_joules,
        "error_bound_joules": whole["error_joules_per_run"] + isolated["predicted_error_joules"],
    }


def _by_class(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in kernels:
        if each["joules_per_run"] is not None:
            part = found.setdefault(each["class"], {"kernels": 0, "calls": 0, "joules_per_run": 0.0})
            part["kernels"] += 1
            part["calls"] += each["count"]
            part["joules_per_run"] += each["joules_per_run"]
    return found
