"""Run every benchmark and print one table: what `make bench` does.

Each script is a process of its own and prints JSON rows; `--out` keeps them, with the machine they were measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import CLOCK

HERE = Path(__file__).parent
SCRIPTS = (
    "capture_cost",
    "complete_path",
    "compiled_code",
    "replay_cost",
    "triton_launches",
    "replay_memory",
    "file_size",
    "large_capture",
    "comparing_captures",
    "derived_tolerances",
    "kernel_tasks",
    "dump_rows",
    "payload_speed",
    "recorder_memory",
    "growth",
    "honest_intervals",
    "per_op_sum",
    "per_op_thousand",
    "import_coverage",
    "probe_reports",
    "report_page",
    "rank_folders",
)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def rows_of(script: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of one script; a script that fails is a row without a measurement, and its output goes to stderr."""
    command = [sys.executable, str(HERE / f"{script}.py"), *(["--quick"] if quick else [])]
    # ExecutionTraceObserver announces every start and stop as a warning.
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode:
        rows.append(
            {
                "what": script,
                "measured": None,
                "unit": "",
                "at_most": None,
                "at_least": None,
                "met": None,
                "details": {"reason": f"the script gave exit code {done.returncode}"},
            }
        )
    return rows


def target(found: dict[str, Any]) -> str:
    if found["at_most"] is not None and found["at_least"] is not None:
        return f"{found['at_least']:g} to {found['at_most']:g}"
    if found["at_most"] is not None:
        return f"≤ {found['at_most']:g}"
    return f"≥ {found['at_least']:g}" if found["at_least"] is not None else ""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, aligned, so that it reads on a terminal as well."""
    cells = [("what", "measured", "target", "met"), ("", "", "", "")]
    for found in rows:
        measured = (
            f"{found['measured']:.3g} {found['unit']}"
            if found["measured"] is not None
            else "not measured: " + found["details"]["reason"]
        )
        cells.append((found["what"], measured, target(found), {True: "yes", False: "no", None: ""}[found["met"]]))
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines[1] = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: tries the scripts, measures nothing useful")
    parser.add_argument("--out", type=Path, help="write the rows, with their details and the machine, as JSON")
    asked = parser.parse_args()
    if unknown := set(asked.scripts) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    rows = []
    for script in asked.scripts or SCRIPTS:
        print(f"{script} …", file=sys.stderr, flush=True)
        rows += rows_of(script, asked.quick)
    print(" · ".join(f"{key} {value}" for key, value in machine().items()) + f" · {CLOCK} clock\n")
    print(table(rows))
    if asked.out:
        asked.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    sys.exit(any(found["measured"] is None and "exit code" in found["details"].get("reason", "") for found in rows))


if __name__ == "__main__":
    main()
