"""What a capture is asked to record, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replayfmt.errors import UsageError

PAYLOADS = ("full", "none")
DIGESTS = ("live", "ops", "none")
COMPILED = ("keep", "eager")

# A frame's worth: small enough to keep memory flat, large enough that encoding costs little an op.
CHUNK_RECORDS = 16384


@dataclass(frozen=True)
class CaptureOptions:
    """The policies of one capture. Raises UsageError for values that do not exist or contradict each other.

    `payload`: `full` embeds the bytes of storages no captured op produced, `none` records metadata only (and implies
    `digests="none"`). `digests`: what verification will compare. `audit`: hash every op's inputs before it, and import
    again what was written from outside. `compiled`: torch.compile'd regions run as they would (`keep`) or as their
    operators (`eager`). `start_op` and `stop_op` count ops from 0; ops in [start_op, stop_op) are recorded.
    `start_scope` and `stop_scope` are scope names: recording starts when the one is first entered, and stops for good
    when the other is first left after that. `force` overwrites an existing file. `chunk_records`: records a frame.
    """

    payload: str = "full"
    digests: str = "live"
    audit: bool = False
    compiled: str = "keep"
    start_op: int | None = None
    stop_op: int | None = None
    start_scope: str | None = None
    stop_scope: str | None = None
    force: bool = False
    chunk_records: int = CHUNK_RECORDS

    def __post_init__(self) -> None:
        for name, allowed in (("payload", PAYLOADS), ("digests", DIGESTS), ("compiled", COMPILED)):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}={value!r} is not known; use one of {', '.join(allowed)}")
        if self.payload == "none":
            if self.digests == "ops":
                raise UsageError(
                    "payload='none' records no content, so digests='ops' cannot be recorded; use digests='none'"
                )
            object.__setattr__(self, "digests", "none")
        for name in ("start_op", "stop_op"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise UsageError(f"{name}={value!r} must be a count of ops, 0 or more")
        if self.start_op is not None and self.stop_op is not None and self.stop_op <= self.start_op:
            raise UsageError(f"stop_op={self.stop_op} leaves nothing to record after start_op={self.start_op}")
        if type(self.chunk_records) is not int or not 1 <= self.chunk_records <= 1 << 20:
            raise UsageError(f"chunk_records={self.chunk_records!r} must be between 1 and {1 << 20}")

    @property
    def limited(self) -> bool:
        """Whether only a part of the program is recorded."""
        return any(value is not None for value in (self.start_op, self.stop_op, self.start_scope, self.stop_scope))

    def policies(self) -> dict[str, Any]:
        """What the session says of these options: those that decide what the capture holds."""
        stated: dict[str, Any] = {
            "payload": self.payload,
            "digests": self.digests,
            "audit": self.audit,
            "compiled": self.compiled,
        }
        for name in ("start_op", "stop_op", "start_scope", "stop_scope"):
            if getattr(self, name) is not None:
                stated[name] = getattr(self, name)
        return stated
