"""Replays captures in a process without the programs, and prints what came of it as JSON. Arguments: the captures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import replayfmt
from replayfmt.errors import OpReplayError


def replayed(path: str) -> dict[str, Any]:
    if Path(path).stem in ("as_it_is", "of_nothing", "touching"):
        with replayfmt.open(path) as capture:
            return {"values": capture.ops.by_ordinal[2].results(replay=True, allow_code=True)[0].tolist()}
    if "/hostile" in path:
        return {"outcome": replayfmt.run(path, verify="none", allow_code=True).outcome}
    with replayfmt.Plan(path, allow_code=True) as plan:
        results = [plan.execute(verify="bitwise") for _ in range(2)]
        return {
            "outcomes": [result.outcome for result in results],
            "digests": results[0].verification.digests,
            "notes": list(results[0].notes),
        }


def main() -> None:
    found = {}
    for path in sys.argv[1:]:
        try:
            found[path] = replayed(path)
        except OpReplayError as error:
            found[path] = {"error": str(error), "findings": list(getattr(error, "findings", ()))}
    print(json.dumps({"found": found, "imported": sorted(name for name in sys.modules if name.startswith("tests"))}))


if __name__ == "__main__":
    main()
