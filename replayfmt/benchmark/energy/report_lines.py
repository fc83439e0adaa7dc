"""A report of energy as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayfmt.format.printable import counted, printable

from ..gpu_state import gpu_lines
from ..reports.units import duration


def report_lines(content: dict[str, Any], top: int) -> Iterator[str]:
    """A table of a report's content, with the `top` kernels that take the most."""
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
            f"            {log['same_time']} rows have the time of another row of their GPU: what has one time is one "
            "sample, their mean"
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
        + ("" if isolated["share_of_calls"] is None else f"; they are {isolated['share_of_calls']:.1%} of the calls")
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


def joules_text(value: float) -> str:
    """With a fitting unit."""
    for scale, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} nJ"


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
