"""How much of other tools' traces becomes work that replays: each in ../shared/traces, imported and run on the CPU.

Counts distinct ops (operator, types, shapes, strides, concrete inputs; the autograd engine's wrappers are no ops), also
weighted by how often each was called and by the device time it took. What does not replay is grouped by reason: there
is no CPU kernel for it, its library is absent, its data is not in the trace, it is no operator (collectives, generated
kernels, graph launches), or it failed, which counts against the target: everything that has a kernel here and its data
in the trace replays.

Of each trace of at least a megabyte it also shows how much processor time the import takes, as a multiple of that of
reading the file with json.loads, in one process and with the garbage collector off in both: beside torch's objects it
would make the reading take three times as long. Execution traces are also repeated to 60,000 nodes: what a node costs
once its kind is known.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import arguments, in_turns, median_of, progress, row, scratch

TRACES = Path(os.environ.get("OPREPLAY_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
_LARGE_BYTES = 1 << 20
_MANY_NODES = 60_000
FOLDERS = ("kineto", "execution_trace", "tracelens_ir")
NO_KERNEL, NO_LIBRARY, NO_DATA, NO_OPERATOR, FAILED = (
    "no CPU kernel",
    "library absent",
    "data missing",
    "no operator",
    "failed",
)
_REASONS = {"import_incomplete": NO_DATA, "no_schema": NO_LIBRARY}
_ABSENT = re.compile(
    r"has no kernel for|that only the captured kind of device gives|only the captured kind|"
    r"'CPU' backend|not implemented for|"
    # A kernel for this device, but for none of the combinations of dtypes that the other one has.
    r"expected scalar type|expected (?:bfloat16|float16|float32)\S* with strides .* got "
    r"(?:bfloat16|float16|float32)\["
)


@dataclass
class Coverage:
    """Distinct ops of one trace by outcome; `weights` are calls and device nanoseconds."""

    name: str
    unique: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    device_ns: Counter[str] = field(default_factory=Counter)
    why: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    imported: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: str, calls: int, device_ns: int, op: str, reason: str) -> None:
        self.unique[outcome] += 1
        self.calls[outcome] += calls
        self.device_ns[outcome] += device_ns
        if outcome != "replayed":
            self.why[outcome][f"{op}: {reason}"] += 1

    def share(self, counted: Counter[str]) -> float | None:
        """What replayed, of what could: has a kernel here, and its data."""
        possible = counted["replayed"] + counted[FAILED]
        return counted["replayed"] / possible if possible else None


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(f"opreplay-{command[0]}")
    return subprocess.run([str(program), *command[1:]], text=True, capture_output=True)


def covered(trace: Path, directory: Path) -> Coverage | str:
    """Import a trace and run it; a sentence where that could not be done."""
    coverage, kineto = Coverage(trace.name), trace.parent.name == "kineto"
    capture, report = directory / "trace.opreplay", directory / "report.jsonl"
    graph = trace.parent.name == "execution_trace"
    done = tool(
        "import",
        "--force",
        f"--report={report}",
        "-o",
        str(capture),
        *(["--unique"] if kineto else []),
        *(["--rewrite=portable"] if graph else []),
        str(trace),
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    coverage.imported = rows[0]["unique"]
    for each in rows[1:]:
        if each["status"] == "incomplete":
            outcome = _REASONS.get(each["reason"], NO_OPERATOR)
            coverage.add(
                outcome, each["calls"], each["device_ns"] or 0, each["op"], f"{each['reason']}: {each['detail']}"
            )
    ran = tool("run", "--device=cpu", "--keep-going", "--verify=none", "--format=jsonl", str(capture))
    verdicts = {row["ordinal"]: row for row in map(json.loads, ran.stdout.splitlines()) if row["kind"] == "verdict"}
    if not verdicts and any(each["status"] != "incomplete" for each in rows[1:]):
        return (ran.stderr.strip().splitlines() or ["opreplay-run said nothing"])[-1]
    for op, ordinals, calls, device_ns in groups(capture):
        reasons = [verdicts[number] for number in ordinals if verdicts[number]["verdict"] != "ok"]
        outcome, reason = ("replayed", "") if not reasons else (outcome_of(reasons[0]), reasons[0]["reason"])
        coverage.add(outcome, calls, device_ns, op, re.sub(r"ordinal \d+", "an ordinal", reason))
    return coverage


def outcome_of(verdict: dict[str, Any]) -> str:
    return NO_KERNEL if _ABSENT.search(verdict["reason"]) else FAILED


def groups(capture: Path) -> Iterator[tuple[str, list[int], int, int]]:
    """Distinct ops of a capture: name, ordinals, calls, device nanoseconds."""
    from replayfmt.format.codes import RecordKind
    from replayfmt.format.reader import open_capture
    from replayfmt.format.signature_text import signature_of

    found: dict[str, list[Any]] = {}
    with open_capture(capture) as reader:
        for record in reader.records():
            if record.kind is not RecordKind.op:
                continue
            key = str(signature_of(record, reader, values=True))
            group = found.setdefault(key, [reader.kernels[record.signature.kernel].qualified_name, [], 0, 0])
            count = record.calls
            group[1].append(record.ordinal)
            group[2] += count
            group[3] += count * (record.device_duration_ns or 0)
    for group in found.values():
        yield tuple(group)


def content(trace: Path) -> bytes:
    """The JSON of a trace."""
    if ".tar" in trace.suffixes:
        with tarfile.open(trace) as archive:
            wanted = (each for each in archive if each.name.endswith(".json") and "_resources/" not in each.name)
            file = archive.extractfile(next(wanted))
            assert file is not None
            return file.read()
    data = trace.read_bytes()
    return gzip.decompress(data) if trace.suffix == ".gz" else data


def cost(trace: Path, directory: Path, rounds: int) -> None:
    """One row: the import's processor time as a multiple of that of json.loads."""
    from replayfmt.collector import collector_paused
    from replayfmt.importers.importing import import_trace

    def read() -> float:
        with collector_paused():
            begin = time.process_time()
            json.loads(content(trace).decode(errors="surrogateescape"), strict=False)
            return time.process_time() - begin

    def imported() -> float:
        begin = time.process_time()
        import_trace(trace, directory / "cost.opreplay", force=True)
        return time.process_time() - begin

    taken = in_turns({"read": read, "import": imported}, rounds)
    row(
        f"import {trace.name.partition('.')[0]}: processor time, of reading its JSON",
        median_of(lambda read, imported: imported / read, taken["read"], taken["import"]),
        at_most=3.0,
        seconds=taken,
    )


def repeated(trace: Path, directory: Path, least: int) -> Path:
    """An execution trace whose nodes come again with other ids until there are as many; its roots come once."""
    document = json.loads(content(trace))
    above = "ctrl_deps" if "ctrl_deps" in document["nodes"][0] else "parent"
    roots = {node["id"] for node in document["nodes"] if node["id"] == node[above]}
    again = [node for node in document["nodes"] if node["id"] not in roots]
    span = 1 + max(node["id"] for node in again)
    for shift in range(span, span * (1 + (least - 1) // len(document["nodes"])), span):
        document["nodes"] += [
            {**node, "id": node["id"] + shift, above: node[above] + (0 if node[above] in roots else shift)}
            for node in again
        ]
    path = directory / f"{trace.name.partition('.')[0]}, {len(document['nodes']):,} nodes.json"
    path.write_text(json.dumps(document))
    return path


def show(coverage: Coverage) -> None:
    """What a person wants to see of one trace, on stderr."""
    imported = ", ".join(f"{count} {status}" for status, count in coverage.imported.items())
    print(f"\n{coverage.name}: {sum(coverage.unique.values())} distinct ops; imported {imported}", file=sys.stderr)
    for outcome in ("replayed", NO_KERNEL, NO_LIBRARY, NO_DATA, NO_OPERATOR, FAILED):
        if coverage.unique[outcome]:
            print(
                f"  {outcome:<15} {coverage.unique[outcome]:>5} distinct  {coverage.calls[outcome]:>6} calls  "
                f"{coverage.device_ns[outcome] / 1e6:>10.3f} ms on the device",
                file=sys.stderr,
            )
            for reason, count in coverage.why[outcome].most_common():
                print(f"      {count} x {reason[:150]}", file=sys.stderr)


def main() -> None:
    quick = arguments(__doc__).quick
    traces = [path for folder in FOLDERS for path in sorted((TRACES / folder).glob("*.json*"))]
    if not traces:
        row("import: distinct ops that replay, of those that can", None, reason=f"there are no traces in {TRACES}")
        return
    for trace in traces[-1:] if quick else traces:
        progress(trace.name)
        with scratch() as directory:
            coverage = covered(trace, directory)
            if quick or len(content(trace)) >= _LARGE_BYTES:
                cost(trace, directory, 1 if quick else 5)
                if trace.parent.name == "execution_trace" and not quick:
                    cost(repeated(trace, directory, _MANY_NODES), directory, 5)
        what = f"import {trace.name.partition('.')[0]}: distinct ops that replay, of those that can"
        if isinstance(coverage, str):
            row(what, None, reason=coverage)
            continue
        show(coverage)
        share = coverage.share(coverage.unique)
        details = {
            "distinct": dict(coverage.unique),
            "calls": dict(coverage.calls),
            "device_ns": dict(coverage.device_ns),
            "imported": coverage.imported,
            "why": {outcome: dict(counted) for outcome, counted in coverage.why.items()},
        }
        if share is None:
            row(what, None, reason="nothing of it has a CPU kernel and its data", **details)
        else:
            row(what, share, at_least=1.0, **details)


if __name__ == "__main__":
    main()
