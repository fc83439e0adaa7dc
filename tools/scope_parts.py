"""A scope of a capture as a capture of its own, for as long as it is measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replayfmt.replay.plan import Plan

    from .replay_flags import ReplayFlags


@contextmanager
def plan_of_scope(capture: str, flags: ReplayFlags, name: str) -> Iterator[Plan]:
    """The plan of a capture that was cut to the scopes of a name, in a temporary file. Raises ReplayRefused for
    what cutting it out, replaying it apart and the caller raise on purpose, without the file's name."""
    from replayfmt.errors import OpReplayError, ReplayRefused
    from replayfmt.trim.selection import Wanted
    from replayfmt.trim.trimming import checked_here, trim_capture

    with tempfile.TemporaryDirectory() as directory:
        part = os.path.join(directory, "scope.opreplay")
        try:
            with flags.plan(capture, keep_going=True) as plan:
                trim_capture(plan, part, Wanted(scope=(name,)), checked_here(flags.plan), verify=flags.verify)
            with flags.plan(part) as alone:
                yield alone
        except OpReplayError as error:
            raise ReplayRefused(str(error).partition("\n")[0].replace(part, "the part")) from error
