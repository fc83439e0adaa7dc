"""Whether a file of measurements is of the capture that it is shown with."""

from __future__ import annotations

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader

# In the traces of replays: the session of the capture that was replayed.
TRACE_SESSION = "opreplay_capture_session"


def require_same_capture(where: str, session: object, reader: CaptureReader) -> None:
    """Raises UsageError if `session`, which a file of measurements names, is not that of the capture. `where` is the
    flag and the file."""
    if session != reader.session.session_id:
        raise UsageError(
            f"{where}: was measured on another capture (session {session!s:.80}); expected one of {reader.path} "
            f"(session {reader.session.session_id}): measure this capture, or name the other one"
        )
