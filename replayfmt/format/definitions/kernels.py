"""The family of kernels."""

from __future__ import annotations

import numpy as np

from ..codes import KernelKind
from ..container.frames import MAX_ATTACHMENTS
from ..model import Kernel
from ..operator_names import name_problem
from ..operator_schema import canonical_schema
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family

_LAST_KIND = int(max(KernelKind))
_LIMIT = f"the limit is {MAX_ATTACHMENTS}"


class KernelFamily(Family[Kernel]):
    name = "kernel"
    fields = "kernel_kind:[ubyte] kernel_name:[uint] kernel_overload:[uint] kernel_schema:[uint]"
    added_fields = "kernel_attachments:[uint]"
    nested_fields = "kernel_attachment:[uint]"
    frequent = True

    def row(self, definition: Kernel) -> DefinitionRow:
        name, overload, attachments = definition.name, definition.overload, definition.attachments
        problem = name_problem(name, overload) if definition.kind is not KernelKind.collective else ""
        if problem:
            raise ValueError(problem)
        if len(attachments) > MAX_ATTACHMENTS:
            raise ValueError(f"{definition.qualified_name} has {len(attachments)} attachments; {_LIMIT}")
        if len(set(attachments)) != len(attachments):
            raise ValueError(f"{definition.qualified_name} lists an attachment twice: {attachments}")
        values = (int(definition.kind), name, overload, definition.schema, len(attachments))
        return DefinitionRow(values, [(number,) for number in attachments])

    def admit(self, definition: Kernel, defined: DefinedSoFar) -> None:
        for number in definition.attachments:
            defined.require("attachment", number)

    def at(self, rows: DefinitionColumns, row: int) -> Kernel:
        return Kernel(
            rows.text("kernel_name", row),
            rows.text("kernel_overload", row),
            canonical_schema(rows.text("kernel_schema", row)),
            KernelKind(rows.number("kernel_kind", row)),
            tuple(rows.column("kernel_attachment")[rows.nested("kernel", row)].tolist()),
        )

    def check(self, body: TablesBody) -> None:
        body.code("kernel_kind", _LAST_KIND)
        for name in ("kernel_name", "kernel_overload", "kernel_schema"):
            body.ids(name, "string")
        called = body.columns["kernel_kind"] != KernelKind.collective
        names, overloads = (body.columns[name][called].tolist() for name in ("kernel_name", "kernel_overload"))
        texts = body.texts({*names, *overloads})
        for name, overload in zip(names, overloads, strict=True):
            problem = name_problem(texts[name], texts[overload])
            if problem:
                raise body.fail(problem)
        body.ids("kernel_attachment", "attachment")
        counts = body.columns["kernel_attachments"]
        if len(counts) and int(counts.max()) > MAX_ATTACHMENTS:
            raise body.fail(f"a kernel has {int(counts.max())} attachments; {_LIMIT}")
        listed = np.repeat(np.arange(len(counts)), counts) << 32 | body.columns["kernel_attachment"]
        listed.sort()
        if (listed[1:] == listed[:-1]).any():
            raise body.fail("a kernel lists an attachment twice")


KERNELS = KernelFamily()
