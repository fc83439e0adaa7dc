"""Signatures: the constant part of a record, which forms they may have, and which slots their records need.

The rules are the same for the writer's caller and for a file that is read. `SignatureFamily` stores signatures as
columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from .codes import DType, Layout, MemoryFormat, OpStatus, RecordKind, ValueKind
from .definition_families import DefinedSoFar, DefinitionColumns, DefinitionRow, Family, TablesBody
from .frames import MAX_NESTING
from .model import Node, Signature

COLUMNS = ("tensors", "ints", "floats")

Counts = tuple[int, int, int]  # by column

# How many slots a node of each kind takes.
SLOTS: dict[ValueKind, Counts] = {
    ValueKind.tensor: (1, 0, 0),
    ValueKind.int: (0, 1, 0),
    ValueKind.storage: (0, 1, 0),
    ValueKind.generator: (0, 1, 0),
    ValueKind.payload: (0, 1, 0),
    ValueKind.range: (0, 1, 0),
    ValueKind.recipe: (0, 1, 0),
    ValueKind.float: (0, 0, 1),
    ValueKind.complex: (0, 0, 2),
}
_NONE: Counts = (0, 0, 0)
_BY_KIND = np.array([SLOTS.get(ValueKind(kind), _NONE) for kind in range(max(ValueKind) + 1)], np.int64).T.copy()


def slot_counts(kinds: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """How many slots records of each signature have: int64[3, signatures]. `kinds` are the value kinds of all nodes,
    `nodes` says how many of them each signature has."""
    running = np.zeros((3, len(kinds) + 1), np.int64)
    np.cumsum(_BY_KIND.take(kinds, axis=1), axis=1, out=running[:, 1:])
    ends = np.concatenate(([0], np.cumsum(nodes, dtype=np.int64)))
    return np.diff(running.take(ends, axis=1), axis=1)


class NodePlace(NamedTuple):
    """A node with the first slot it takes in each column, counted from the record's first ones."""

    node: Node
    tensor_slot: int
    int_slot: int
    float_slot: int
    children: tuple[NodePlace, ...]

    def of_kind(self, kind: ValueKind) -> Iterator[NodePlace]:
        """The nodes of a kind among this one and everything below it, in order."""
        if self.node.kind is kind:
            yield self
        for child in self.children:
            yield from child.of_kind(kind)

    @property
    def tensors(self) -> list[int]:
        """The tensor slots of this node and everything below it, in order."""
        return [each.tensor_slot for each in self.of_kind(ValueKind.tensor)]

    @property
    def constant(self) -> bool:
        """Whether the value takes no slot at all: it is the same in every record of the signature."""
        return self.node.kind not in SLOTS and all(child.constant for child in self.children)


def own_slots(node: Node) -> Counts:
    """How many slots of tensors, integers and floats a node has itself, without its children."""
    return SLOTS.get(node.kind, _NONE)


def _place(nodes: tuple[Node, ...], start: Counts) -> tuple[tuple[NodePlace, ...], Counts]:
    """Places of nodes whose slots begin at `start`, and where the next node's slots would begin."""
    placed = []
    tensor, integer, real = start
    for node in nodes:
        first = (tensor, integer, real)
        own = own_slots(node)
        tensor, integer, real = tensor + own[0], integer + own[1], real + own[2]
        children: tuple[NodePlace, ...] = ()
        if node.children:
            children, (tensor, integer, real) = _place(node.children, (tensor, integer, real))
        placed.append(NodePlace(node, *first, children))
    return tuple(placed), (tensor, integer, real)


class SlotLayout:
    """Where a signature's arguments and results keep their slots. `slots` is how many a record has; of its tensors the
    first `arg_tensors` are arguments."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.args, middle = _place(signature.args, _NONE)
        self.results, self.slots = _place(signature.results, middle)
        self.arg_tensors = middle[0]

    def arg(self, name: str) -> NodePlace | None:
        return next((each for each in self.args if each.node.name == name), None)

    @property
    def arg_storages(self) -> list[int]:
        """The int slots of storages among the arguments."""
        return [place.int_slot for each in self.args for place in each.of_kind(ValueKind.storage)]

    def nodes(self, kind: ValueKind) -> list[NodePlace]:
        return [place for each in (*self.args, *self.results) for place in each.of_kind(kind)]


V = ValueKind
CONTAINERS = frozenset({V.list, V.tuple, V.composite})
TEXT_CONSTANTS = frozenset({V.string, V.process_group, V.opaque, V.composite})
CODE_CONSTANTS: dict[ValueKind, int] = {V.dtype: max(DType), V.layout: max(Layout), V.memory_format: max(MemoryFormat)}

_STREAM = (("device", frozenset({V.device})), ("stream", frozenset({V.int})))  # which stream: its number on a device

# The leading arguments that a record of each kind has, in order, with the value kinds each may have.
ARGUMENTS: dict[RecordKind, tuple[tuple[str, frozenset[ValueKind]], ...]] = {
    RecordKind.scope_begin: (("name", frozenset({V.string})),),
    RecordKind.scope_end: (("name", frozenset({V.string})),),
    RecordKind.storage_import: (
        ("storage", frozenset({V.storage})),
        ("payload", frozenset({V.payload, V.range, V.recipe, V.none})),
        ("version", frozenset({V.int})),
        ("reason", frozenset({V.string})),
    ),
    RecordKind.storage_resize: (("storage", frozenset({V.storage})), ("bytes", frozenset({V.int}))),
    RecordKind.storage_release: (("storage", frozenset({V.storage})),),
    RecordKind.generator_state: (("generator", frozenset({V.generator})), ("payload", frozenset({V.payload, V.none}))),
    RecordKind.host_read: (("method", frozenset({V.string})), ("tensor", frozenset({V.tensor}))),
    RecordKind.digest: (("tensor", frozenset({V.tensor})), ("of", frozenset({V.int})), ("result", frozenset({V.int}))),
    RecordKind.synchronize: (("device", frozenset({V.device})),),
    RecordKind.event_record: (("event", frozenset({V.int})), *_STREAM),
    RecordKind.event_wait: (("event", frozenset({V.int})), *_STREAM),
    RecordKind.stream_use: (("tensor", frozenset({V.tensor})), *_STREAM),
    RecordKind.stream_synchronize: _STREAM,
    RecordKind.event_synchronize: (("event", frozenset({V.int})),),
    RecordKind.unsupported: (
        ("reason", frozenset({V.string})),
        ("op", frozenset({V.string})),
        ("detail", frozenset({V.string})),
    ),
}
_NUMBER = frozenset({V.float, V.none})
# What may follow them in host_read and digest records: a tensor's digest.
DIGEST_ARGUMENTS: tuple[tuple[str, frozenset[ValueKind]], ...] = (
    *((name, frozenset({V.int})) for name in ("hash_low", "hash_high", "elements", "nan", "inf")),
    *((name, _NUMBER) for name in ("min", "max", "mean", "l2")),
    ("sample", frozenset({V.list})),
)
# Lengths and counts among the arguments of these records, none of which may be negative: the place of each among the
# ints of the record, counted from the end where it is negative. Records that may have a digest have all of it, or none.
AMOUNTS: dict[RecordKind, dict[str, int]] = {
    RecordKind.storage_import: {"version": -1},
    RecordKind.storage_resize: {"bytes": 1},
    RecordKind.digest: {"elements": 4, "nan": 5, "inf": 6},
    RecordKind.host_read: {"elements": 2, "nan": 3, "inf": 4},
    RecordKind.event_record: {"event": 0, "stream": 1},
    RecordKind.event_wait: {"event": 0, "stream": 1},
    RecordKind.stream_use: {"stream": 0},
    RecordKind.stream_synchronize: {"stream": 0},
    RecordKind.event_synchronize: {"event": 0},
}
SETTING_KINDS = frozenset({V.none, V.bool, V.int, V.float, V.string})


def argument_nodes(kind: RecordKind, **given: str | ValueKind) -> tuple[Node, ...]:
    """The nodes of the arguments that a record of a kind always has. `given` has the text of each that is one, and the
    value kind of each that may have several."""
    nodes = []
    for name, kinds in ARGUMENTS[kind]:
        value = given[name] if len(kinds) > 1 or V.string in kinds else next(iter(kinds))
        nodes.append(Node(V.string, name, value) if isinstance(value, str) else Node(value, name))
    return tuple(nodes)


def members(kinds: Collection[IntEnum], all_kinds: type[IntEnum]) -> np.ndarray:
    """Which codes of an enumeration are among `kinds`: bool[highest code + 1], to be indexed with codes that were
    checked. Looking codes up is many times faster than np.isin for the few that most captures have."""
    mask = np.zeros(max(all_kinds) + 1, bool)
    mask[[int(kind) for kind in kinds]] = True
    return mask


def flatten(signature: Signature) -> list[tuple[int | str, ...]]:
    """Kind, name (0: none), constant and number of children of each of a signature's nodes, in pre-order. Raises
    ValueError if it breaks a rule of the format."""
    if (signature.kind == RecordKind.op) != (signature.kernel > 0):
        raise ValueError(f"a signature of kind {signature.kind.name} with kernel {signature.kernel}")
    if (signature.kind == RecordKind.op) != (signature.status != OpStatus.none):
        raise ValueError(f"a signature of kind {signature.kind.name} with status {signature.status.name}")
    if signature.results and (signature.kind != RecordKind.op or signature.status == OpStatus.raised):
        raise ValueError(f"a signature of kind {signature.kind.name} and status {signature.status.name} with results")
    _check_arguments(signature)
    rows: list[tuple[int | str, ...]] = []
    # Iterative, so that nesting is bounded by our limit and not by the interpreter's stack.
    stack = [(node, 1) for node in reversed((*signature.args, *signature.results))]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_NESTING:
            raise ValueError(f"values nested deeper than {MAX_NESTING}")
        if node.children and node.kind not in CONTAINERS:
            raise ValueError(f"a {node.kind.name} node {node.name!r} with children")
        rows.append((int(node.kind), node.name or 0, _constant(node), len(node.children)))
        stack.extend((child, depth + 1) for child in reversed(node.children))
    return rows


def _constant(node: Node) -> int | str:
    value = node.constant
    if node.kind in TEXT_CONSTANTS:
        if isinstance(value, str):
            return value
    elif node.kind == V.bool:
        if value in (0, 1):
            return int(value)
    elif node.kind in CODE_CONSTANTS:
        if isinstance(value, int) and 1 <= value <= CODE_CONSTANTS[node.kind]:
            return int(value)
    elif node.kind == V.device:
        if isinstance(value, int) and value >= 1:
            return value
    elif value is None:
        return 0
    raise ValueError(f"a {node.kind.name} node {node.name!r} with the constant {value!r}")


def _check_arguments(signature: Signature) -> None:
    """Raise ValueError where a record kind's fixed arguments are not what they must be."""
    expected = ARGUMENTS.get(signature.kind, ())
    given = signature.args
    if signature.kind in (RecordKind.op, RecordKind.collective):
        return
    if signature.kind == RecordKind.global_state:
        wrong = [node.name for node in given if node.kind not in SETTING_KINDS or not node.name]
        if wrong:
            raise ValueError(f"global_state with settings {wrong} that are not scalars")
        return
    if signature.kind in (RecordKind.digest, RecordKind.host_read) and len(given) > len(expected):
        expected = (*expected, *DIGEST_ARGUMENTS)
    fits = len(given) == len(expected) and all(
        node.name == name and node.kind in kinds for node, (name, kinds) in zip(given, expected, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{signature.kind.name} with arguments {[(n.name, n.kind.name) for n in given]}; "
            f"expected {[(name, sorted(k.name for k in kinds)) for name, kinds in expected]}"
        )
    for node in given:
        if node.name == "sample" and any(c.kind not in (V.int, V.float, V.complex) for c in node.children):
            raise ValueError(f"{signature.kind.name} with a sample that holds more than numbers")


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
            digested = rows[args[rows] != lead] if kind in (RecordKind.digest, RecordKind.host_read) else rows[:0]
            if (args[rows] != lead).sum() != len(digested):
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
