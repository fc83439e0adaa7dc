"""Reports of probes: how long the evaluation of a recording takes, from the mapped file to the finished picture.

The recording is that of a 4096 × 4096 fill: 32,768 blocks of four warps on 132 SMs.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from measuring import arguments, progress, row, scratch, seconds

from replayfmt.probes.recordings import LaunchShape, write_recording
from replayfmt.probes.reporting import NamedFile, evaluate, write_report

EXAMPLE = Path(__file__).parents[1] / "examples" / "probe_recordings.py"


def main() -> None:
    quick = arguments(__doc__).quick
    blocks = 1024 if quick else 32768
    scheduled = runpy.run_path(str(EXAMPLE))["scheduled"]
    with scratch() as directory:
        path = directory / "1.000000.bin"
        write_recording(path, LaunchShape((blocks, 1, 1), (128, 1, 1)), [scheduled(blocks, 4, 80.0, 1)])
        for kind in ("schedule", "warps"):
            progress(f"report {kind}")
            evaluated = seconds(lambda kind=kind: evaluate(kind, [NamedFile(str(path))]))
            result = evaluate(kind, [NamedFile(str(path))])
            drawn = seconds(lambda result=result: write_report(result, directory / "reports"))
            row(
                f"report {kind} of {blocks:,} blocks on 132 SMs: tables and pictures",
                evaluated + drawn,
                "s",
                at_most=10,
                seconds_evaluating=evaluated,
                seconds_drawing_and_writing=drawn,
            )


if __name__ == "__main__":
    main()
