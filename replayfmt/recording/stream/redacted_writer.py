"""Writes a capture that reveals neither the machine nor its user: texts are rewritten as they are written.

External files are excepted: their names are chosen where all other files are known.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re

from replayfmt.format.model import Session, Signature
from replayfmt.format.redaction import Redaction
from replayfmt.format.writer import CaptureWriter


class RedactedWriter(CaptureWriter):
    """A writer whose session, signatures and scopes go through a redaction."""

    def __init__(
        self, path: str | os.PathLike[str], session: Session, redaction: Redaction, *, force: bool = False
    ) -> None:
        """As CaptureWriter. `session` is the one that `redaction` was made for; its redacted form is written."""
        super().__init__(path, redaction.session, force=force)
        self._redaction = redaction

    def signature(self, signature: Signature) -> int:
        return super().signature(self._redaction.signature(signature))

    def scope(self, parent: int, name: str) -> int:
        return super().scope(parent, self._redaction.text(name))


def user_names() -> list[str]:
    """The names of this process's user: the login, and the name of the home directory."""
    names = {os.path.basename(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError, OSError):  # a number without a name, as in some containers
        names.add(getpass.getuser())
    return sorted(name for name in names if re.search(r"\w", name))
