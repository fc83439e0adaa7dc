"""A bounded part of what `make fuzz` does without end: captures changed behind valid checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from format.reseal import split

from replayfmt.format.reader import open_capture

from . import fuzzing
from .fuzzing import fuzz, make_case, make_sources, try_case

CASES = {"read": 200, "plan": 30, "run": 60}


@pytest.mark.parametrize("stage", CASES)
def test_files_changed_behind_valid_checks_come_to_a_result_or_one_error(stage: str) -> None:
    tried, failures = fuzz(stage, 0, CASES[stage])
    assert (tried, failures) == (CASES[stage], [])


def test_the_fuzzer_sees_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are valid behind their checks: only a part is refused, and that for what they say. And what is no error
    of ours gets out."""
    sources = make_sources(tmp_path)
    assert [split(make_case(sources, seed))[0] for seed in range(3)]
    assert make_case(sources, 5) == make_case(sources, 5) != make_case(sources, 6)
    path = tmp_path / "case.opreplay"
    ended = {try_case(sources, seed, "read", path) for seed in range(40)}
    assert {"ok", "InvalidCapture"} <= ended
    monkeypatch.setattr(fuzzing, "open_capture", lambda path: open_capture(path).nothing)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        for seed in range(40):
            try_case(sources, seed, "read", path)
