"""Replays captures with the skeletons of their Triton kernels in place of these, and prints what came of each as JSON.
Arguments: a folder to write to, and the captures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import replayfmt
from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture


def bits_differ(capture: Path, folder: Path) -> bool:
    requests = []
    with open_capture(capture) as reader:
        for number, kernel in enumerate(reader.kernels):
            if kernel is not None and kernel.kind is KernelKind.triton:
                text = kernel_skeleton(reader, number, allow_code=True)
                file = folder / f"{capture.stem}_{number}.py"
                file.write_text(text)
                (said,) = re.findall(r"opreplay-run .*-substitution=(\S+)=THIS_FILE(\S*) CAPTURE", text)
                requests.append(f"{said[0]}={file}{said[1]}")
    with replayfmt.Plan(capture, allow_code=True, substitutions=requests) as plan:
        assert plan.execute(verify="close").outcome == "ok"
        assert plan.substitution is not None and plan.substitution.report is not None
        checks = plan.substitution.report.checks
        return not checks or any(not each.ok or each.distance.different for each in checks)


if __name__ == "__main__":
    print(json.dumps({Path(each).stem: bits_differ(Path(each), Path(sys.argv[1])) for each in sys.argv[2:]}))
