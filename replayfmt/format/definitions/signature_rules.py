"""The form of signatures: the rules that the writer applies to its caller and the reader to the file.

`flatten` makes the rows of node columns out of a model.Signature and refuses one that breaks the rules; signatures.py
finds the same faults in columns that came from a file, vectorized, because a capture may have very many. Fixed
arguments of record kinds are in ARGUMENTS, as the schema's comments on RecordKind name them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

import numpy as np

from ..codes import DType, Layout, MemoryFormat, OpStatus, RecordKind, ValueKind
from ..container.frames import MAX_NESTING
from ..model import Node, Signature

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
# What may follow them in host_read and must follow in digest records: a tensor's digest.
DIGEST_ARGUMENTS: tuple[tuple[str, frozenset[ValueKind]], ...] = (
    *((name, frozenset({V.int})) for name in ("hash_low", "hash_high", "elements", "nan", "inf")),
    *((name, _NUMBER) for name in ("min", "max", "mean", "l2")),
    ("sample", frozenset({V.list})),
)
# Lengths and counts among the arguments of these records, none of which may be negative: the place of each among the
# ints of the record, counted from the end where it is negative. A host read has a digest or no ints at all.
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
    if signature.kind == RecordKind.digest or (signature.kind == RecordKind.host_read and len(given) > len(expected)):
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
