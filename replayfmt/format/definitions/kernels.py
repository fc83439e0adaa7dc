"""The family of kernels."""

from __future__ import annotations

from ..codes import KernelKind
from ..model import Kernel
from ..operator_names import name_problem
from ..operator_schema import canonical_schema
from .checks import TablesBody
from .family import DefinitionColumns, DefinitionRow, Family

_LAST_KIND = int(max(KernelKind))


class KernelFamily(Family[Kernel]):
    name = "kernel"
    fields = "kernel_kind:[ubyte] kernel_name:[uint] kernel_overload:[uint] kernel_schema:[uint]"
    frequent = True

    def row(self, definition: Kernel) -> DefinitionRow:
        kind, name, overload = definition.kind, definition.name, definition.overload
        problem = name_problem(name, overload) if kind is KernelKind.operator else ""
        if problem:
            raise ValueError(problem)
        return DefinitionRow((int(kind), name, overload, definition.schema))

    def at(self, rows: DefinitionColumns, row: int) -> Kernel:
        return Kernel(
            rows.text("kernel_name", row),
            rows.text("kernel_overload", row),
            canonical_schema(rows.text("kernel_schema", row)),
            KernelKind(rows.number("kernel_kind", row)),
        )

    def check(self, body: TablesBody) -> None:
        body.code("kernel_kind", _LAST_KIND)
        for name in ("kernel_name", "kernel_overload", "kernel_schema"):
            body.ids(name, "string")
        operators = body.columns["kernel_kind"] == KernelKind.operator
        names, overloads = (body.columns[name][operators].tolist() for name in ("kernel_name", "kernel_overload"))
        texts = body.texts({*names, *overloads})
        for name, overload in zip(names, overloads, strict=True):
            problem = name_problem(texts[name], texts[overload])
            if problem:
                raise body.fail(problem)


KERNELS = KernelFamily()
