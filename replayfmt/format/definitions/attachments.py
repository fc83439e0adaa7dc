"""The family of attachments: what belongs to kernels, each in a payload. Kernels list them."""

from __future__ import annotations

import re

from ..model import Attachment
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


class AttachmentFamily(Family[Attachment]):
    name = "attachment"
    fields = "attachment_role:[uint] attachment_name:[uint] attachment_payload:[uint]"

    def row(self, definition: Attachment) -> DefinitionRow:
        problem = _role_problem(definition.role)
        if problem:
            raise ValueError(problem)
        return DefinitionRow((definition.role, definition.name, definition.payload))

    def admit(self, definition: Attachment, defined: DefinedSoFar) -> None:
        defined.payload_bytes(definition.payload)

    def at(self, rows: DefinitionColumns, row: int) -> Attachment:
        return Attachment(
            rows.text("attachment_role", row), rows.text("attachment_name", row), rows.number("attachment_payload", row)
        )

    def check(self, body: TablesBody) -> None:
        body.ids("attachment_role", "string")
        body.ids("attachment_name", "string")
        body.payload_ids("attachment_payload")
        for role in body.texts(set(body.columns["attachment_role"].tolist())).values():
            problem = _role_problem(role)
            if problem:
                raise body.fail(problem)


def _role_problem(role: str) -> str:
    """Why `role` is not the role of an attachment; "" where it is."""
    if _ROLE.match(role):
        return ""
    return f"{role[:80]!a} is not an attachment's role, expected up to 64 lower-case letters, digits and underscores"


ATTACHMENTS = AttachmentFamily()
