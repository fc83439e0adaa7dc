"""Runs one op of a capture on its own, after the earlier ops that produce its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replayfmt.errors import ReplayFailed, ReplayRefused, UsageError
from replayfmt.format.arguments import text_of
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.initializers import Initializer

from .plan import Plan


def replay_op(
    reader: CaptureReader,
    ordinal: int,
    device: str | None,
    file_remaps: Sequence[str] = (),
    initializers: Sequence[Initializer] = (),
    allow_code: bool = False,
) -> Any:
    """What the kernel of the op at an ordinal returns, replayed on `device` (default: the captured ones).

    `file_remaps`, `initializers` and `allow_code` are those of a Plan.

    Raises UsageError if there is no op at the ordinal, ReplayRefused if it or what it needs cannot be run here,
    ReplayFailed if it raises.
    """
    if not 0 <= ordinal < reader.record_count or reader.record(ordinal).kind is not RecordKind.op:
        raise UsageError(f"{reader.path}: there is no op at ordinal {ordinal}")
    with Plan(
        reader,
        [] if device is None else [text_of("device", device)],
        allow_incomplete=True,
        keep_going=True,
        file_remaps=file_remaps,
        initializers=initializers,
        allow_code=allow_code,
    ) as plan:
        verdict, result = plan.run_single(ordinal)
    if verdict.verdict == "ok":
        return result
    message = f"{reader.path}: ordinal {ordinal} ({verdict.op}): {verdict.reason}"
    if verdict.verdict == "failed":
        raise ReplayFailed(message)
    raise ReplayRefused(message, (verdict.reason,))
