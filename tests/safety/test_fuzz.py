"""A bounded part of what `make fuzz` does without end: captures changed behind valid checks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from format.reseal import join, split

from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan

from . import fuzzing
from .fuzzing import fuzz, make_case, make_sources, try_case

CASES = {"read": 200, "plan": 30, "run": 60, "tools": 40}


@pytest.mark.guarantee("numbers")
@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES)
def test_files_changed_behind_valid_checks_come_to_a_result_or_one_error(stage: str) -> None:
    tried, failures = fuzz(stage, 0, CASES[stage])
    assert (tried, failures) == (CASES[stage], [])


@pytest.mark.slow
def test_the_fuzzer_sees_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are valid behind their checks: only a part is refused, and that for what they say. And what is no error
    of ours gets out."""
    sources = make_sources(tmp_path)
    for number, source in enumerate(sources):  # as they are, they are captures, and replays of them pass
        path = tmp_path / f"{number}.opreplay"
        path.write_bytes(join(source.preamble, source.frames))
        assert check_capture(path).complete
        with Plan(path) as plan:
            assert plan.execute(verify="auto").outcome == "ok", path
    assert [split(make_case(sources, seed))[0] for seed in range(3)]
    assert make_case(sources, 5) == make_case(sources, 5) != make_case(sources, 6)
    path = tmp_path / "case.opreplay"
    ended = Counter(try_case(sources, seed, "read", path) for seed in range(80))
    assert ended["InvalidCapture"] and ended["ok"] > 3, ended
    monkeypatch.setattr(fuzzing, "open_capture", lambda path: open_capture(path).nothing)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        for seed in range(40):
            try_case(sources, seed, "read", path)
