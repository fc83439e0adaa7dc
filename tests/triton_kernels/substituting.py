"""Replays a capture with other kernels in place of its Triton kernel, and prints what came of each as JSON. Arguments:
the capture, and selectors with functions."""

from __future__ import annotations

import json
import sys
from typing import Any

import replayfmt
from replayfmt.errors import OpReplayError


def substituted(path: str, request: str) -> dict[str, Any]:
    try:
        with replayfmt.Plan(path, allow_code=True, substitutions=[request]) as plan:
            result = plan.execute(verify="close")
            assert plan.substitution is not None and plan.substitution.report is not None
            (check,) = plan.substitution.report.checks
            return {"outcome": result.outcome, "calls": check.calls, "ok": check.ok}
    except OpReplayError as error:
        return {"error": f"{type(error).__name__}: {error} {' '.join(getattr(error, 'findings', ()))}"}


if __name__ == "__main__":
    print(json.dumps({request: substituted(sys.argv[1], request) for request in sys.argv[2:]}))
