"""A part of what `make exact` compares: a program's results under a capture are those without one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from .comparing import Comparison, is_whole
from .documented import documented, documented_version, families, of_the_mode
from .entries import entries
from .modes import MODES

SAMPLES = 4
# Entries of which it is known that a dispatch mode changes them, and in which mode. They are found on every processor:
# PyTorch takes another way, not only another rounding.
KNOWN: tuple[tuple[str, str], ...] = (
    ("nn.functional.affine_grid", "autocast"),
    ("nn.functional.bilinear", "autocast"),
    ("linalg.pinv", "autocast"),
    ("prod", "grad"),
    ("prod", "create_graph"),
    ("cumprod", "create_graph"),
    ("median", "grad"),
    ("max.reduction_no_dim", "grad"),
    ("min.reduction_no_dim", "create_graph"),
)


def part() -> list[tuple[str, str]]:
    """Entries and modes that the suite compares: those that are known, and others from all over, in turn."""
    every = list(itertools.islice(entries(), 7, None, 24))
    return list(dict.fromkeys((*KNOWN, *zip(every, itertools.cycle(MODES)))))


@pytest.mark.sweep
def test_programs_compute_under_a_capture_what_they_compute_without_one(tmp_path: Path) -> None:
    reports = [Comparison(entries()[name], mode, tmp_path, samples=SAMPLES).run() for name, mode in part()]
    assert [report for report in reports if not is_whole(report)] == []
    assert sum(report.compared for report in reports) > 100
    assert sum(report.replays["verified"] for report in reports) > len(reports) / 2
    if documented_version() != torch.__version__:
        pytest.skip(
            f"docs/exactness.md lists what PyTorch {documented_version()} does, and this is {torch.__version__}"
        )
    found, listed = of_the_mode([report.row() for report in reports]), documented()
    for (name, mode), kinds in found.items():
        assert families(kinds) <= families(listed.get((name, mode), ())), f"{name} ({mode}) differs in another way"
    gone = {pair for pair in part() if pair in listed} - set(found)
    assert not gone, "docs/exactness.md lists them, and they do not differ any more"
    assert set(KNOWN) <= set(found)
