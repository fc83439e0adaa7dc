"""Replays samples of PyTorch's operators (OpInfo) from captures without content, and says which do not run.

    PYTHONPATH=tests python -m initializers.operator_samples [--payload=none|integers] [--samples=N] [PATTERN ...]

Exit code 1 if fewer than 99 in 100 samples run.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from exactness.entries import OpEntry, entries
from exactness.modes import Case

import replayfmt
from replayfmt.errors import OpReplayError

SHARE = 0.99  # of the samples must run


class Outcomes:
    """How many samples ran, and why the others did not, by name."""

    def __init__(self) -> None:
        self.ran = 0
        self.why: dict[str, str] = {}

    @property
    def share(self) -> float:
        """The share of the samples that ran."""
        return self.ran / max(1, self.ran + len(self.why))

    def __str__(self) -> str:
        failed = "".join(f"\n  {name}: {why}" for name, why in self.why.items())
        return f"{self.ran} of {self.ran + len(self.why)} samples ran{failed}"


def operators() -> dict[str, OpEntry]:
    """The operators of OpInfo that have a kernel for the CPU, by name."""
    named = entries().items()
    return {name: each for name, each in named if isinstance(each, OpEntry) and each.why_not("inference") is None}


def replay_samples(named: dict[str, OpEntry], payload: str, folder: Path, samples: int = 0) -> Outcomes:
    """Capture samples of each operator and replay them from synthesized content. `samples`: of each, 0 for all."""
    outcomes = Outcomes()
    for name, entry in named.items():
        for case in _some(entry, samples):
            why = _replay(case, payload, folder / "sample.opreplay")
            if why == "":
                outcomes.ran += 1
            elif why is not None:
                outcomes.why[f"{name}, {case.label}"] = why
    return outcomes


def _some(entry: OpEntry, samples: int) -> Iterator[Case]:
    cases = [case for case in entry.cases("inference") if not case.label.startswith("error")]
    step = max(1, len(cases) // samples) if samples else 1
    return itertools.islice(cases, 0, None, step)


def _replay(case: Case, payload: str, path: Path) -> str | None:
    """Why the replay of a sample did not run; "" if it did, None if there is nothing to replay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with replayfmt.capture(path, payload=payload, force=True):
                case.program()
        except Exception:
            return None  # it ran no operator, or cannot run here
        try:
            with replayfmt.open(path) as capture:
                if capture.summary.unsupported:
                    return None
                with replayfmt.Plan(capture) as plan:
                    plan.execute(verify="none")
        except OpReplayError as error:
            findings = getattr(error, "findings", ())
            return "; ".join(findings) or str(error).partition(f"{path.name}: ")[2] or str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--payload", choices=("none", "integers"), default="none")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="of each operator (default: all)")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", default=["*"])
    options = parser.parse_args()
    named = {
        name: entry
        for name, entry in operators().items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.patterns)
    }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = replay_samples(named, options.payload, Path(folder), options.samples)
    print(outcomes)
    print(Counter(name.partition(",")[0] for name in outcomes.why).most_common())
    return 0 if outcomes.share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
