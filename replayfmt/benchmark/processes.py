"""One measurement made of several, each in a process of its own.

The times of one process have a narrow interval that the next process often misses: where memory lies, which caches and
cores it shares, what else the host does stay the same for seconds, and are different then. So the median of each
process counts as one time here, and the interval covers the median that another such run would give. See T. Kalibera
and R. Jones, "Rigorous Benchmarking in Reasonable Time" (ISMM 2013), on repetition at the level that varies.

Works on the JSON documents alone (no torch).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from replayfmt.errors import ReplayFailed
from replayfmt.format.validation import parse_json, printable

from .run_report import crowded, statistics_fields
from .statistics import low_quantile, possible_places, summarize

Row = dict[str, Any]
_MEANS = ("real_time", "cpu_time", "host_time", "inclusive_us")


def document_of(command: Sequence[str]) -> dict[str, Any]:
    """The document that a benchmark prints. Raises ReplayFailed with what it said if it printed none."""
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
    try:
        found: dict[str, Any] = parse_json(ran.stdout)
    except ValueError:
        said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise ReplayFailed(f"a measurement in a fresh process failed: {printable(said[0], 1000)}") from None
    return found


def put_together(documents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[Row]]:
    """The context and the rows of all of them as one measurement; the most expensive op first, as in each."""
    by_name: dict[str, list[Row]] = {}
    for document in documents:
        for row in document["benchmarks"]:
            by_name.setdefault(row["name"], []).append(row)
    rows = [_row(rows) for rows in by_name.values()]
    contexts = [document["context"] for document in documents]
    shares = [context["others_share"] for context in contexts]
    context = contexts[0] | {
        "processes": len(documents),
        "others_share": None if None in shares else max(shares),
        "warnings": _said_by_all(contexts),
        "gpus": [row for each in contexts for row in each["gpus"]],
    }
    context["warnings"] += crowded(context["torch_num_threads"], context["others_share"])
    if "estimated_us" not in context:
        return context, rows
    timed = sorted((row for row in rows if "estimated_us" in row), key=lambda row: -row["estimated_us"])
    total = sum(row["estimated_us"] for row in timed)
    context |= {
        "estimated_us": total if timed else None,
        "complete": all(each["complete"] for each in contexts),
        "failed": max(each["failed"] for each in contexts),
        "successful": min(each["successful"] for each in contexts),
    }
    bounds = [row["estimated_us_low"] and (row["estimated_us_low"], row["estimated_us_high"]) for row in timed]
    for place, (row, (first, last)) in enumerate(zip(timed, possible_places(bounds), strict=True)):
        row |= {"rank": place + 1, "rank_low": first, "rank_high": last, "family_index": place}
        row["share"] = row["estimated_us"] / total if total else None
    return context, [*timed, *(row for row in rows if "estimated_us" not in row)]


def _row(rows: Sequence[Row]) -> Row:
    """One row of those of all processes; one of them without times has none."""
    for row in rows:
        if "unmeasurable" in row or row.get("error_occurred"):
            return row
    merged = rows[0] | {"processes": len(rows), "iterations": sum(row["iterations"] for row in rows)}
    merged["warnings"] = _said_by_all(rows)
    merged |= {name: sum(row[name] for row in rows) / len(rows) for name in _MEANS if _known(name, rows)}
    if "ops_per_second" in merged:
        merged["ops_per_second"] = merged["ops"] / merged["real_time"] * 1e9
    if "estimated_us" in merged:
        found = summarize([row["estimated_us"] for row in rows], of_processes=True)
        merged["estimated_us"] = found.median
        merged["estimated_us_low"], merged["estimated_us_high"] = (
            (None, None) if found.interval is None else (found.interval.low, found.interval.high)
        )
        merged.pop("estimated_us_low_reason", None)
        merged["shortest_times_ns"] = sorted(row["estimated_us_shortest"] * 1e3 for row in rows)
        if found.interval is None:
            merged["estimated_us_low_reason"] = found.reasons["interval"]
    if "samples" in merged:
        medians = [row["median_real_time"] for row in rows]
        fields = statistics_fields(summarize(medians, of_processes=True))
        merged = {name: value for name, value in merged.items() if name.removesuffix("_reason") not in fields} | fields
        merged["samples"] = {"real_time": medians}
        merged["shortest_times_ns"] = sorted(low_quantile(row["samples"]["real_time"]) for row in rows)
    return merged


def _known(name: str, rows: Sequence[Row]) -> bool:
    return all(row.get(name) is not None for row in rows)


def _said_by_all(those: Sequence[Mapping[str, Any]]) -> list[str]:
    """Their warnings, without what each says of its own times, which are not the times here."""
    return [text for text in those[0]["warnings"] if all(text in each["warnings"] for each in those)]
