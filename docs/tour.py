"""Draws docs/tour.svg, the picture in README.md, from what the commands really print: `make picture`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 104
# Each command, and how many lines of what it prints are shown: (from, up to).
COMMANDS: tuple[tuple[str, tuple[int, int | None]], ...] = (
    ("opreplay-capture -o step.opreplay gpt2_training_step.py", (0, None)),
    ("opreplay-run step.opreplay", (1, 9)),
    ("opreplay-benchmark --per-op --group-by=kernel --top=5 --replay-scope=execute step.opreplay", (0, 9)),
)


def draw(target: Path) -> None:
    """Run the commands in an empty folder and write what a terminal shows to `target`, as SVG."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    environment = {
        **os.environ,
        "COLUMNS": str(WIDTH),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for command, (first, last) in COMMANDS:
            run = command.replace("gpt2_training_step.py", str(ROOT / "examples/gpt2_training_step.py"))
            done = subprocess.run(
                run,
                shell=True,
                check=True,
                cwd=folder,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            lines = done.stdout.splitlines()
            for line in lines[first:last]:
                console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
            if last is not None and last < len(lines):
                console.print("…", style="dim")
            console.print()
    console.save_svg(str(target), title="opreplay")


if __name__ == "__main__":
    draw(ROOT / "docs" / "tour.svg")
