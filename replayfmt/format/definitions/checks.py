"""Every rule for a Tables body, checked when it is read.

Vectorized, because a capture may define very many things: lengths, ids in range, codes the reader knows, the shape of
each signature's tree of nodes, and the arguments that record kinds have. What passed here can be turned into objects
without looking again.
"""

from __future__ import annotations

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from ..codes import (
    MAJOR_VERSION,
    MINOR_VERSION,
    DType,
    FileValidation,
    KernelKind,
    Layout,
    OpStatus,
    RecordKind,
    TensorFlag,
    ValueKind,
)
from ..container import flat
from ..container.frames import MAX_LENGTH, MAX_NESTING
from ..container.layouts import SCALARS, TABLES
from ..operator_names import name_problem
from .external_files import files_problem, ranges_problem, recipes_problem
from .signature_rules import (
    ARGUMENTS,
    CODE_CONSTANTS,
    CONTAINERS,
    DIGEST_ARGUMENTS,
    SETTING_KINDS,
    TEXT_CONSTANTS,
    members,
)
from .tables_output import FAMILIES, META_COLUMNS, NODE_COLUMNS

_KINDS = max(ValueKind) + 1
_IS_CONTAINER = members(CONTAINERS, ValueKind)
_IS_TEXT = members(TEXT_CONSTANTS, ValueKind)
_IS_SETTING = members(SETTING_KINDS, ValueKind)
_IS_NUMBER = members({ValueKind.int, ValueKind.float, ValueKind.complex}, ValueKind)
_FLAGS, _VALIDATIONS = int(sum(TensorFlag)), int(sum(FileValidation))
# The highest codes; asking an enumeration for them each time takes longer than checking a small capture's columns.
_LAST = {
    enumeration: int(max(enumeration)) for enumeration in (DType, KernelKind, Layout, OpStatus, RecordKind, ValueKind)
}
_ALLOWED = {
    fixed: np.array([members(allowed, ValueKind) for _name, allowed in fixed])
    for fixed in (*ARGUMENTS.values(), DIGEST_ARGUMENTS)
    if fixed
}


class TablesCheck:
    """One Tables body, checked. `strings` maps its strings to their ids, `columns` has its other columns, `counts` says
    how many ids each family has with it."""

    def __init__(
        self,
        body: bytes,
        minor: int,
        where: str,
        counts: dict[str, int],
        string_ids: dict[str, int],
        file_bytes: np.ndarray,
        payload_bytes: np.ndarray,
    ) -> None:
        """Check all of a body, given what comes before it: how many ids each family has, the strings, the lengths of
        external files and of payloads. Raises InvalidCapture, or UnsupportedVersion for codes of a newer minor version.
        """
        self._table = flat.root(body, TABLES, where)
        self._minor = minor
        self._where = where
        self._before = counts
        self._string_ids = string_ids
        self._file_bytes = file_bytes
        self._payload_bytes = payload_bytes
        self.counts = dict(counts)
        self.columns: dict[str, np.ndarray] = {}
        self.strings: dict[str, int] = {}
        self._check_strings()
        for family, check in (
            ("device", self._check_device),
            ("kernel", self._check_kernel),
            ("generator", self._check_generator),
            ("scope", self._check_scope),
            ("meta", self._check_meta),
            ("signature", self._check_signature),
            ("file", self._check_file),
            ("range", self._check_range),
            ("recipe", self._check_recipe),
        ):
            self._read_family(family)
            check()

    def _fail(self, what: str) -> InvalidCapture:
        return InvalidCapture(f"{self._where}: {what}")

    def _too_new(self, what: str) -> UnsupportedVersion:
        return UnsupportedVersion(
            f"{self._where}: {what}, from format version {MAJOR_VERSION}.{self._minor}; "
            f"this reader knows {MAJOR_VERSION}.{MINOR_VERSION}"
        )

    def _first(self, family: str, rows: int) -> None:
        first = self._table.scalar(f"first_{family}")
        expected = self._before[family] + 1
        if rows and first != expected:
            raise self._fail(f"defines {family} {first} and on; expected {expected}")
        self.counts[family] += rows

    def _get(self, name: str) -> np.ndarray:
        column = self._table.column(name)
        if column is None:
            column = np.zeros(0, SCALARS[TABLES.fields[name].type[1:-1]])
        self.columns[name] = column
        return column

    def _range(self, name: str, lowest: int, highest: int) -> None:
        column = self.columns[name]
        if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
            raise self._fail(f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}")

    def _code(self, name: str, highest: int, lowest: int = 1) -> None:
        """Like _range for an enumeration, which a newer minor version may have extended."""
        column = self.columns[name]
        if len(column) and int(column.max()) > highest and self._minor > MINOR_VERSION:
            raise self._too_new(f"{name} holds {int(column.max())}")
        self._range(name, lowest, highest)

    def _check_strings(self) -> None:
        strings = self._table.strings("strings")
        self._first("string", len(strings))
        self.strings = dict(zip(strings, range(self._before["string"] + 1, self.counts["string"] + 1), strict=True))
        if len(self.strings) != len(strings) or not self._string_ids.keys().isdisjoint(strings):
            raise self._fail("defines a string twice")

    def _read_family(self, family: str) -> None:
        names = FAMILIES[family]
        lengths = [len(self._get(name)) for name in names]
        if len(set(lengths)) != 1:
            raise self._fail(f"{family} columns have different lengths: {dict(zip(names, lengths, strict=True))}")
        self._first(family, lengths[0])

    def _check_device(self) -> None:
        strings = self.counts["string"]
        self._range("device_kind", 1, strings)
        self._range("device_name", 1, strings)
        self._range("device_fingerprint", 0, strings)
        self._range("device_index", -1, 0x7FFFFFFF)

    def _check_kernel(self) -> None:
        self._code("kernel_kind", _LAST[KernelKind])
        for name in ("kernel_name", "kernel_overload", "kernel_schema"):
            self._range(name, 1, self.counts["string"])
        operators = self.columns["kernel_kind"] == KernelKind.operator
        names, overloads = (self.columns[name][operators].tolist() for name in ("kernel_name", "kernel_overload"))
        wanted = {*names, *overloads}
        texts = (
            {
                number: text
                for known in (self._string_ids, self.strings)
                for text, number in known.items()
                if number in wanted
            }
            if wanted
            else {}
        )
        for name, overload in zip(names, overloads, strict=True):
            self._refuse(name_problem(texts[name], texts[overload]))

    def _check_generator(self) -> None:
        self._range("generator_device", 1, self.counts["device"])
        self._range("generator_default", 0, 1)

    def _check_scope(self) -> None:
        self._range("scope_name", 1, self.counts["string"])
        parents = self.columns["scope_parent"].astype(np.int64)
        # A parent comes before its children, so that paths are finite.
        if len(parents) and (parents >= np.arange(len(parents)) + self._before["scope"] + 1).any():
            raise self._fail("a scope's parent is not defined before it")

    def _check_meta(self) -> None:
        self._code("meta_dtype", _LAST[DType])
        self._code("meta_layout", _LAST[Layout])
        self._range("meta_device", 1, self.counts["device"])
        flags = self.columns["meta_flags"]
        if len(flags) and int(np.bitwise_or.reduce(flags)) & ~_FLAGS:
            self._code("meta_flags", _FLAGS, 0)
            raise self._fail("meta_flags has unknown bits")
        dimensions = int(self.columns["meta_rank"].sum(dtype=np.int64))
        for name in META_COLUMNS:
            if len(self._get(name)) != dimensions:
                raise self._fail(f"{name} has {len(self.columns[name])} elements, meta_rank adds up to {dimensions}")
            self._range(name, 0, MAX_LENGTH)

    def _refuse(self, problem: str) -> None:
        if problem:
            raise self._fail(problem)

    def _check_file(self) -> None:
        self._code("file_validation", _VALIDATIONS, 0)
        self._refuse(files_problem(self.columns, self.counts["string"], self._payload_bytes))

    def _check_range(self) -> None:
        file_bytes = np.concatenate((self._file_bytes, self.columns["file_bytes"]))
        self._refuse(ranges_problem(self.columns, file_bytes, self._payload_bytes))

    def _check_recipe(self) -> None:
        self._code("recipe_dtype", _LAST[DType])
        self._refuse(recipes_problem(self.columns))

    def _check_signature(self) -> None:
        for name in NODE_COLUMNS:
            self._get(name)
        count = len(self.columns["signature_kind"])
        total = int(self.columns["signature_nodes"].sum(dtype=np.int64))
        lengths = {name: len(self.columns[name]) for name in NODE_COLUMNS}
        if any(length != total for length in lengths.values()):
            raise self._fail(f"signature_nodes add up to {total}, the node columns have {lengths}")
        if not count:
            return
        self._code("signature_kind", _LAST[RecordKind])
        self._code("signature_status", _LAST[OpStatus], 0)
        self._range("signature_kernel", 0, self.counts["kernel"])
        self._code("node_kind", _LAST[ValueKind], 0)
        self._range("node_name", 0, self.counts["string"])
        kinds, statuses = self.columns["signature_kind"], self.columns["signature_status"]
        ops = kinds == RecordKind.op
        if ((self.columns["signature_kernel"] != 0) != ops).any() or ((statuses != OpStatus.none) != ops).any():
            raise self._fail("a signature has a kernel or a status without being an op, or is an op without them")
        if ((self.columns["signature_results"] != 0) & (~ops | (statuses == OpStatus.raised))).any():
            raise self._fail("a signature that is not of an op that returned has results")
        self._check_constants()
        self._check_trees()

    def _check_constants(self) -> None:
        kinds, constants = self.columns["node_kind"], self.columns["node_constant"]
        lowest, highest = np.zeros(_KINDS, np.int64), np.zeros(_KINDS, np.int64)
        highest[ValueKind.bool] = 1
        lowest[_IS_TEXT], highest[_IS_TEXT] = 1, self.counts["string"]
        lowest[ValueKind.device], highest[ValueKind.device] = 1, self.counts["device"]
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
            if kind in CODE_CONSTANTS and self._minor > MINOR_VERSION:
                raise self._too_new(message)
            raise self._fail(message)
        if (self.columns["node_children"][~_IS_CONTAINER[kinds]] != 0).any():
            raise self._fail("a node that is not a list, tuple or composite has children")

    def _check_trees(self) -> None:
        """Each signature's nodes are exactly its arguments and results in pre-order, not nested too deep."""
        sizes = self.columns["signature_nodes"].astype(np.int64)
        roots = self.columns["signature_args"].astype(np.int64) + self.columns["signature_results"]
        children = self.columns["node_children"].astype(np.int64)
        ends = np.cumsum(sizes)
        begins = ends - sizes
        if (roots[sizes == 0] != 0).any():
            raise self._fail("a signature has arguments or results without nodes")
        if len(children):
            self._check_shape(sizes, roots, children, begins, ends)
        self._check_arguments(begins, children)

    def _check_shape(
        self, sizes: np.ndarray, roots: np.ndarray, children: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> None:
        owner = np.repeat(np.arange(len(sizes)), sizes)
        running = np.cumsum(children - 1)
        before = np.concatenate(([0], running))[begins]
        # How many nodes are still owed after each node: never none before the last one, none after it.
        owed = roots[owner] + running - before[owner]
        last = np.zeros(len(children), bool)
        last[ends[sizes > 0] - 1] = True
        if (owed[last] != 0).any() or (owed[~last] <= 0).any():
            raise self._fail("a signature's nodes do not form its arguments and results")
        self._check_depth(begins, ends, owner, children)

    def _check_depth(self, begins: np.ndarray, ends: np.ndarray, owner: np.ndarray, children: np.ndarray) -> None:
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
                    raise self._fail(f"a signature's values are nested deeper than {MAX_NESTING}")
                if below:
                    open_levels.append(below)

    def _check_arguments(self, begins: np.ndarray, children: np.ndarray) -> None:
        """The arguments that records other than ops always have, so that nobody must look whether they are there."""
        kinds, args = self.columns["signature_kind"], self.columns["signature_args"].astype(np.int64)
        for kind, fixed in ARGUMENTS.items():
            rows = np.flatnonzero(kinds == kind)
            if not len(rows):
                continue
            lead = len(fixed)
            self._check_fixed(kind, begins[rows], fixed)
            digested = rows[args[rows] != lead] if kind == RecordKind.host_read else rows[:0]
            if kind == RecordKind.digest:
                digested = rows
            elif (args[rows] != lead).sum() != len(digested):
                raise self._fail(f"a {kind.name} signature with other than {lead} arguments")
            if len(digested):
                if (args[digested] != lead + len(DIGEST_ARGUMENTS)).any():
                    raise self._fail(f"a {kind.name} signature without a whole digest")
                self._check_fixed(kind, begins[digested] + lead, DIGEST_ARGUMENTS)
                self._check_samples(kind, begins[digested] + lead + len(DIGEST_ARGUMENTS) - 1, children)
        self._check_settings(begins)

    def _check_fixed(
        self, kind: RecordKind, begins: np.ndarray, fixed: tuple[tuple[str, frozenset[ValueKind]], ...]
    ) -> None:
        """The nodes from `begins` on are `fixed`. All of them but the last are leaves, so they follow one another."""
        if not fixed:
            return
        kinds, names = self.columns["node_kind"], self.columns["node_name"]
        places = np.arange(len(fixed))
        nodes = begins[:, None] + places
        good = nodes < len(kinds)
        if good.all():
            expected = np.array([self._string_id(name) for name, _allowed in fixed])
            good = (expected != 0) & (names[nodes] == expected) & _ALLOWED[fixed][places, kinds[nodes]]
        if not good.all():
            place = int(np.argmin(good.all(axis=0)))
            name, allowed = fixed[place]
            raise self._fail(
                f"a {kind.name} signature whose argument {place} is not `{name}`, "
                f"one of {sorted(value.name for value in allowed)}"
            )

    def _string_id(self, text: str) -> int:
        return self._string_ids.get(text) or self.strings.get(text, 0)

    def _check_settings(self, begins: np.ndarray) -> None:
        rows = np.flatnonzero(self.columns["signature_kind"] == RecordKind.global_state)
        for row in rows.tolist():
            nodes = slice(int(begins[row]), int(begins[row]) + int(self.columns["signature_nodes"][row]))
            kinds, names = self.columns["node_kind"][nodes], self.columns["node_name"][nodes]
            if not (_IS_SETTING[kinds].all() and names.all()):
                raise self._fail("a global_state signature with settings that are not named scalars")

    def _check_samples(self, kind: RecordKind, nodes: np.ndarray, children: np.ndarray) -> None:
        node_kind = self.columns["node_kind"]
        counts = np.concatenate(([0], np.cumsum(_IS_NUMBER[node_kind])))
        sizes = children[nodes]
        ends = nodes + 1 + sizes
        if (ends > len(node_kind)).any() or (counts[ends] - counts[nodes + 1] != sizes).any():
            raise self._fail(f"a {kind.name} signature whose sample holds more than numbers")
