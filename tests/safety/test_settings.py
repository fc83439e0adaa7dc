"""Settings of a capture's session with values of any kind: each is set, or refused in one line, and then put back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from failure.table import recorded
from format.reseal import Frame, change

from replayfmt.errors import OpReplayError
from replayfmt.format.codes import FrameKind
from replayfmt.format.contents import decode_session, encode_session
from replayfmt.pytorch.environment import SETTINGS, Scalar, read_settings
from replayfmt.replay.plan import Plan

VALUES: tuple[Scalar, ...] = (
    None,
    True,
    False,
    -1,
    2,
    2**63 - 1,
    2**64,
    0.5,
    float("nan"),
    "",
    "1,1,",
    "tf32",
    "\x1b[2J\n",
    "x" * 3000,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "autocast.cpu", "no.setting"])
def test_a_value_of_any_kind_is_set_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    x = torch.arange(4.0)
    path = recorded(tmp_path, lambda: x * 2)
    captured, before, outcomes = path.read_bytes(), read_settings(), set()
    for value in VALUES:

        def edit(frame: Frame, to: Scalar = value) -> Frame:
            session = decode_session(frame.body, "head")
            settings = {**session.settings, name: to}
            return replace(frame, body=bytes(encode_session(replace(session, settings=settings))))

        path.write_bytes(captured)
        change(path, FrameKind.head, edit)
        try:
            with Plan(path) as plan:
                outcomes.add(plan.execute(verify="auto").outcome)
        except OpReplayError as error:
            said = [str(error), *getattr(error, "findings", ())]
            assert all(len(each) < 1000 for each in said), said
            assert sum(each.count("\n") for each in said) == 0, said
            assert any(name in each for each in said), said
            outcomes.add("refused")
        assert read_settings() == before, value
    assert "refused" in outcomes
