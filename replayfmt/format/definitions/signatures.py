"""The family of signatures: the constant part of a record, what it calls and the shape of its values.

A signature is stored as rows of node columns in pre-order. signature_rules.py has what a signature may look like, and
applies it to the writer's caller; `check` finds the same faults in columns that came from a file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..codes import OpStatus, RecordKind, ValueKind
from ..container.frames import MAX_NESTING
from ..model import Node, Signature
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family
from .signature_rules import (
    ARGUMENTS,
    CODE_CONSTANTS,
    CONTAINERS,
    DIGEST_ARGUMENTS,
    SETTING_KINDS,
    TEXT_CONSTANTS,
    flatten,
    members,
)

_KINDS = max(ValueKind) + 1
_IS_CONTAINER = members(CONTAINERS, ValueKind)
_IS_TEXT = members(TEXT_CONSTANTS, ValueKind)
_IS_SETTING = members(SETTING_KINDS, ValueKind)
_IS_NUMBER = members({ValueKind.int, ValueKind.float, ValueKind.complex}, ValueKind)
_LAST_KIND, _LAST_STATUS, _LAST_VALUE = int(max(RecordKind)), int(max(OpStatus)), int(max(ValueKind))
_ALLOWED = {
    fixed: np.array([members(allowed, ValueKind) for _name, allowed in fixed])
    for fixed in (*ARGUMENTS.values(), DIGEST_ARGUMENTS)
    if fixed
}


class SignatureFamily(Family[Signature]):
    name = "signature"
    fields = """
        signature_kind:[ubyte] signature_status:[ubyte] signature_kernel:[uint]
        signature_args:[uint] signature_results:[uint] signature_nodes:[uint]
    """
    nested_fields = "node_kind:[ubyte] node_name:[uint] node_constant:[long] node_children:[uint]"

    def row(self, definition: Signature) -> DefinitionRow:
        nodes = flatten(definition)
        args, results = len(definition.args), len(definition.results)
        kind, status = int(definition.kind), int(definition.status)
        return DefinitionRow((kind, status, definition.kernel, args, results, len(nodes)), nodes)

    def admit(self, definition: Signature, defined: DefinedSoFar) -> None:
        if definition.kernel:
            defined.require("kernel", definition.kernel)
        for node in definition.nodes:
            if node.kind is ValueKind.device:
                assert isinstance(node.constant, int)
                defined.require("device", node.constant)

    def at(self, rows: DefinitionColumns, row: int) -> Signature:
        place = rows.nested("signature", row)
        nodes = zip(*(rows.column(name)[place].tolist() for name in self.nested_columns), strict=True)
        strings, leaves = rows.strings, rows.leaves

        def node() -> Node:  # recursion no deeper than MAX_NESTING, which was checked
            kind, name, constant, children = next(nodes)
            text = (strings[name] or "") if name else ""
            value: int | str | None = None
            if kind in TEXT_CONSTANTS:
                value = strings[constant]
            elif kind in (ValueKind.bool, ValueKind.device) or kind in CODE_CONSTANTS:
                value = constant
            if children:
                return Node(ValueKind(kind), text, value, tuple(node() for _ in range(children)))
            leaf = leaves.get((kind, name, constant))
            if leaf is None:
                leaf = leaves[kind, name, constant] = Node(ValueKind(kind), text, value)
            return leaf

        args = tuple(node() for _ in range(rows.number("signature_args", row)))
        results = tuple(node() for _ in range(rows.number("signature_results", row)))
        return Signature(
            RecordKind(rows.number("signature_kind", row)),
            args,
            results,
            rows.number("signature_kernel", row),
            OpStatus(rows.number("signature_status", row)),
        )

    def check(self, body: TablesBody) -> None:
        if not len(body.columns["signature_kind"]):
            return
        body.code("signature_kind", _LAST_KIND)
        body.code("signature_status", _LAST_STATUS, 0)
        body.ids("signature_kernel", "kernel", lowest=0)
        body.code("node_kind", _LAST_VALUE, 0)
        body.ids("node_name", "string", lowest=0)
        kinds, statuses = body.columns["signature_kind"], body.columns["signature_status"]
        ops = kinds == RecordKind.op
        if ((body.columns["signature_kernel"] != 0) != ops).any() or ((statuses != OpStatus.none) != ops).any():
            raise body.fail("a signature has a kernel or a status without being an op, or is an op without them")
        if ((body.columns["signature_results"] != 0) & (~ops | (statuses == OpStatus.raised))).any():
            raise body.fail("a signature that is not of an op that returned has results")
        _check_constants(body)
        sizes = body.columns["signature_nodes"].astype(np.int64)
        ends = np.cumsum(sizes)
        _check_trees(body, sizes, ends)
        _FixedArguments(body, ends - sizes).check()


def unsupported_reasons(columns: Any, first_nodes: np.ndarray) -> dict[int, int]:
    """The reason of each signature of unsupported records, as a string id, by signature id. `columns` returns columns
    by name, `first_nodes` is where each signature's nodes begin."""
    rows = np.flatnonzero(columns("signature_kind") == RecordKind.unsupported)
    reasons = columns("node_constant")[first_nodes[rows]]
    return dict(zip((rows + 1).tolist(), reasons.tolist(), strict=True))


def _check_constants(body: TablesBody) -> None:
    kinds, constants = body.columns["node_kind"], body.columns["node_constant"]
    lowest, highest = np.zeros(_KINDS, np.int64), np.zeros(_KINDS, np.int64)
    highest[ValueKind.bool] = 1
    lowest[_IS_TEXT], highest[_IS_TEXT] = 1, body.counts["string"]
    lowest[ValueKind.device], highest[ValueKind.device] = 1, body.counts["device"]
    for kind, code in CODE_CONSTANTS.items():
        lowest[kind], highest[kind] = 1, code
    wrong = (constants < lowest[kinds]) | (constants > highest[kinds])
    if wrong.any():
        at = int(np.argmax(wrong))
        kind = ValueKind(int(kinds[at]))
        message = (
            f"node {at} is a {kind.name} with the constant {int(constants[at])}, "
            f"allowed {int(lowest[kind])}..{int(highest[kind])}"
        )
        raise body.too_new(message) if kind in CODE_CONSTANTS and body.is_newer else body.fail(message)
    if (body.columns["node_children"][~_IS_CONTAINER[kinds]] != 0).any():
        raise body.fail("a node that is not a list, tuple or composite has children")


def _check_trees(body: TablesBody, sizes: np.ndarray, ends: np.ndarray) -> None:
    """Each signature's nodes are exactly its arguments and results in pre-order, not nested too deep."""
    roots = body.columns["signature_args"].astype(np.int64) + body.columns["signature_results"]
    children = body.columns["node_children"].astype(np.int64)
    if (roots[sizes == 0] != 0).any():
        raise body.fail("a signature has arguments or results without nodes")
    if not len(children):
        return
    begins = ends - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    running = np.cumsum(children - 1)
    before = np.concatenate(([0], running))[begins]
    # How many nodes are still owed after each node: never zero before the last one, zero after it.
    owed = roots[owner] + running - before[owner]
    last = np.zeros(len(children), bool)
    last[ends[sizes > 0] - 1] = True
    if (owed[last] != 0).any() or (owed[~last] <= 0).any():
        raise body.fail("a signature's nodes do not form its arguments and results")
    # Only a signature with that many containers can be nested too deep; there are none in practice.
    containers = np.bincount(owner[children > 0], minlength=len(begins))
    for signature in np.flatnonzero(containers >= MAX_NESTING).tolist():
        open_levels: list[int] = []
        for below in children[begins[signature] : ends[signature]].tolist():
            while open_levels and not open_levels[-1]:
                open_levels.pop()
            if open_levels:
                open_levels[-1] -= 1
            if len(open_levels) >= MAX_NESTING:
                raise body.fail(f"a signature's values are nested deeper than {MAX_NESTING}")
            if below:
                open_levels.append(below)


class _FixedArguments:
    """The arguments that records other than ops always have, so that readers need not check. `begins` is where each
    signature's nodes begin."""

    def __init__(self, body: TablesBody, begins: np.ndarray) -> None:
        self._body, self._begins = body, begins
        self._kinds, self._names = body.columns["node_kind"], body.columns["node_name"]

    def check(self) -> None:
        kinds = self._body.columns["signature_kind"]
        args = self._body.columns["signature_args"].astype(np.int64)
        for kind, fixed in ARGUMENTS.items():
            rows = np.flatnonzero(kinds == kind)
            if not len(rows):
                continue
            lead = len(fixed)
            self._check_fixed(kind, self._begins[rows], fixed)
            digested = rows[args[rows] != lead] if kind == RecordKind.host_read else rows[:0]
            if kind == RecordKind.digest:
                digested = rows
            elif (args[rows] != lead).sum() != len(digested):
                raise self._body.fail(f"a {kind.name} signature with other than {lead} arguments")
            if len(digested):
                if (args[digested] != lead + len(DIGEST_ARGUMENTS)).any():
                    raise self._body.fail(f"a {kind.name} signature without a whole digest")
                self._check_fixed(kind, self._begins[digested] + lead, DIGEST_ARGUMENTS)
                self._check_samples(kind, self._begins[digested] + lead + len(DIGEST_ARGUMENTS) - 1)
        self._check_settings(np.flatnonzero(kinds == RecordKind.global_state))

    def _check_fixed(
        self, kind: RecordKind, begins: np.ndarray, fixed: tuple[tuple[str, frozenset[ValueKind]], ...]
    ) -> None:
        """The nodes from `begins` on are `fixed`. All of them but the last are leaves, so they follow one another."""
        if not fixed:
            return
        places = np.arange(len(fixed))
        nodes = begins[:, None] + places
        good = nodes < len(self._kinds)
        if good.all():
            expected = np.array([self._body.string_id(name) for name, _allowed in fixed])
            named = (expected != 0) & (self._names[nodes] == expected)
            good = named & _ALLOWED[fixed][places, self._kinds[nodes]]
        if not good.all():
            place = int(np.argmin(good.all(axis=0)))
            name, allowed = fixed[place]
            raise self._body.fail(
                f"a {kind.name} signature whose argument {place} is not `{name}`, "
                f"one of {sorted(value.name for value in allowed)}"
            )

    def _check_settings(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            begin = int(self._begins[row])
            nodes = slice(begin, begin + int(self._body.columns["signature_nodes"][row]))
            if not (_IS_SETTING[self._kinds[nodes]].all() and self._names[nodes].all()):
                raise self._body.fail("a global_state signature with settings that are not named scalars")

    def _check_samples(self, kind: RecordKind, nodes: np.ndarray) -> None:
        counts = np.concatenate(([0], np.cumsum(_IS_NUMBER[self._kinds])))
        sizes = self._body.columns["node_children"].astype(np.int64)[nodes]
        ends = nodes + 1 + sizes
        if (ends > len(self._kinds)).any() or (counts[ends] - counts[nodes + 1] != sizes).any():
            raise self._body.fail(f"a {kind.name} signature whose sample holds more than numbers")


SIGNATURES = SignatureFamily()
