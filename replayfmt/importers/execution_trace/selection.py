"""Which nodes of an execution trace represent its work: each piece once, at the deepest level that covers all of it.

An operator that only calls others (a composite like `linear`, a switch between backends like `convolution`) is replaced
by its callees if they produced everything it returned; any other operator represents all of its callees. Nodes that are
not operators (autograd's wrappers, modules, user marks) only contain others. Only a few words of each node are kept, so
a trace need not fit into memory.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.pytorch.operators import operator_named, tells_allocator

from ..common.operators import COMPILED_CODE
from .copies import KeptCopies
from .nodes import USER_SCOPE, TraceNode, communication, operator_name


class Kind(IntEnum):
    """What a node is."""

    container = 0  # autograd's wrappers, modules, the observer's own roots
    mark = 1  # record_function and the profiler's steps: a scope
    operator = 2
    collective = 3
    triton = 4
    hidden = 5  # not an operator, took tensors: its work on them left no trace
    idle = 6  # waiting for a collective, informing the allocator; operators on tensors without memory (meta)
    compiled = 7  # a call of compiled code: contains what operators it calls


# Operators that only choose a backend: their callees were chosen by the traced machine.
_SWITCHES = frozenset({"aten::convolution", "aten::_convolution", "aten::convolution_overrideable"})
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?\Z", re.ASCII)
_ROOTS = re.compile(r"\[pytorch\|profiler\|execution_(graph|trace)\|(thread|process)\]\Z")
# PyTorch's own wrappers, which may call no operator and then did nothing.
_IDLE = re.compile(
    r"(autograd::engine::evaluate_function: |torch::autograd::|torch::distributed::|"
    r"torch\.distributed\.|torch::jit::|Optimizer\.|nccl:|gloo:|enumerate\(|TorchDynamo Cache Lookup|"
    r"Pregraph bytecode|AOTDispatcher |CompiledFunction|"
    r"\w+Backward\d+\Z|detach_?\Z)"
)
# Python handles an operator where a mode or a subclass of torch.Tensor is active: these stand for that below it.
_IN_PYTHON = frozenset({"PythonDispatchMode", "PythonSubclass"})


def gives_way(name: str, overload: str) -> bool:
    """Whether an operator works by calling others, as far as the local PyTorch knows it."""
    if name in _SWITCHES:
        return True
    full = f"{name}.{overload}" if overload else name
    if not _OPERATOR.match(full):
        return False
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"))
    except RuntimeError:
        return False


def kind_of(node: TraceNode) -> Kind:
    """The kind of a node, looked at by itself."""
    if node.kernel_backend == "triton" or (node.kernel_file and not node.schema):
        return Kind.triton
    if node.name == "record_param_comms":
        return Kind.idle if communication(node).get("collective_name") in ("wait", "init") else Kind.collective
    if node.schema:
        name = operator_name(node.schema)[0]
        if tells_allocator(name):
            return Kind.idle
        tensors = [tensor for _position, tensor in (*node.inputs.tensors, *node.outputs.tensors)]
        if tensors and all(tensor.device == "meta" for tensor in tensors):
            return Kind.idle
        return Kind.collective if operator_named(name).collective else Kind.operator
    if _ROOTS.match(node.name):
        return Kind.container
    if COMPILED_CODE.match(node.name):
        return Kind.compiled
    if node.scope == USER_SCOPE:
        return Kind.mark
    if node.name in _IN_PYTHON:
        return Kind.container
    if not _IDLE.match(node.name) and node.inputs.tensors:
        return Kind.hidden
    return Kind.container


_WORK = frozenset({Kind.operator, Kind.collective, Kind.triton})
Path = tuple[tuple[int, str], ...]


@dataclass
class ChosenNodes:
    """`chosen` has the position of every node that is imported, in the order of the trace, `scopes` for each the marks
    around it, outermost first (an index into `paths`, which have the position and the name of each mark). `within`
    likewise tells the names of what is around it and is neither a mark nor an operator (into `wrapped`). `dropped`
    counts what did no work, by name, `wrappers` what only contains others. `inside` is 1 at the position of everything
    within a chosen node. `before` names for some chosen nodes the id of the one that they ran before, whatever their
    own says. `ordered`: the trace has the chosen nodes in the order in which they ran. `problems` are sentences on what
    is wrong with the trace."""

    chosen: array = field(default_factory=lambda: array("q"))
    scopes: array = field(default_factory=lambda: array("q"))
    paths: list[Path] = field(default_factory=lambda: [()])
    within: array = field(default_factory=lambda: array("q"))
    wrapped: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    dropped: Counter[str] = field(default_factory=Counter)
    wrappers: Counter[str] = field(default_factory=Counter)
    inside: bytearray = field(default_factory=bytearray)
    before: dict[int, int] = field(default_factory=dict)
    ordered: bool = True
    problems: list[str] = field(default_factory=list)

    def path_of(self, position: int) -> Path:
        """The marks around a chosen node."""
        return self.paths[self.scopes[bisect_left(self.chosen, position)]]

    def wrappers_of(self, position: int) -> tuple[str, ...]:
        """The names of the wrappers around a chosen node, outermost first."""
        return self.wrapped[self.within[bisect_left(self.chosen, position)]]


class Skeleton:
    """What the selection needs of each node, gathered in one pass over the trace."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids, self._parents, self._threads = array("q"), array("q"), array("q")
        self._forward, self._kinds, self._names = array("q"), array("b"), array("q")
        self._made_first, self._made = array("q", [0]), array("q")  # storages an operator returns, not given to it
        self._out_first, self._out = array("q", [0]), array("q")  # every storage it returns
        self._name_ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._ways: dict[tuple[str, str], bool] = {}
        self._transparent = array("b")
        self._kept = KeptCopies()
        self._handled = set[int]()  # ids of what Python handled

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, node: TraceNode) -> None:
        """Add the next node of the trace."""
        kind = kind_of(node)
        self._kept.add(len(self._ids), node)
        self._ids.append(node.id)
        self._parents.append(node.parent)
        self._threads.append(node.thread)
        self._forward.append(_integer(node.attributes.get("fw_parent", 0)))
        self._kinds.append(kind)
        self._names.append(self._name(node.name))
        if node.name in _IN_PYTHON:
            self._handled.add(node.parent)
        transparent = kind is Kind.operator and (node.id in self._handled or self._gives_way(node.schema))
        self._transparent.append(transparent)
        if kind in (Kind.operator, Kind.collective):
            returned = [tensor.storage for _position, tensor in node.outputs.tensors if tensor.elements]
            self._out.extend(returned)
            if transparent:
                given = {tensor.storage for _position, tensor in node.inputs.tensors}
                self._made.extend(storage for storage in returned if storage not in given)
        self._made_first.append(len(self._made))
        self._out_first.append(len(self._out))

    def _name(self, text: str) -> int:
        number = self._name_ids.get(text)
        if number is None:
            number = self._name_ids[text] = len(self._texts)
            self._texts.append(text)
        return number

    def _gives_way(self, schema: str) -> bool:
        key = operator_name(schema)
        if key not in self._ways:
            self._ways[key] = gives_way(*key)
        return self._ways[key]

    def _damage(self, positions: Mapping[int, int]) -> Iterator[str]:
        """Sentences about nodes that are inconsistent."""
        again = len(self._ids) - len(positions)
        if again:
            yield f"nodes with the id of another node: {again}; children of that id are assigned to the last one"
        parents = [
            (number, parent)
            for number, parent, kind in zip(self._ids, self._parents, self._kinds, strict=True)
            if kind in _WORK
        ]
        own = sum(number == parent for number, parent in parents)
        if own:
            yield f"operators that are their own parents: {own}; treated as outermost"
        lost = sum(parent not in positions for _number, parent in parents)
        if lost:
            yield f"operators whose parents are not in the trace: {lost}; treated as outermost"

    def _positions_differ(self, position: int) -> bool:
        """Whether a node is not its own parent, as the trace's root is."""
        return self._ids[position] != self._parents[position]

    def select(self, *, roots: bool = False) -> ChosenNodes:
        """Choose the nodes. With `roots`, the outermost operators. Raises InvalidCapture if parents form a cycle."""
        positions = {number: position for position, number in enumerate(self._ids)}
        children: dict[int, list[int]] = defaultdict(list)
        tops: list[int] = []
        for position, parent in enumerate(self._parents):
            above = positions.get(parent)
            (tops if above is None or above == position else children[above]).append(position)
        walk = _NodeWalk(self, children, positions, roots)
        walk.problems += self._damage(positions)
        walk.visit(tops)
        if walk.seen != len(self._ids):
            raise InvalidCapture(
                f"{self._path}: {len(self._ids) - walk.seen} nodes of the execution trace are their "
                "own ancestors; the trace is damaged"
            )
        return walk.finish()


def _integer(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 60 else 0


class _NodeWalk:
    """From the roots down, in the order of the trace."""

    def __init__(
        self, skeleton: Skeleton, children: dict[int, list[int]], positions: dict[int, int], roots: bool
    ) -> None:
        self._of, self._children, self._positions, self._roots = skeleton, children, positions, roots
        self.seen = 0
        self._found: list[int] = []
        self._in_compiled: set[int] = set()
        self._selection = ChosenNodes(inside=bytearray(len(skeleton)))
        self.problems = self._selection.problems

    def visit(self, tops: Iterable[int]) -> None:
        of = self._of
        stack = list(tops)
        while stack:
            position = stack.pop()
            self.seen += 1
            kind = Kind(of._kinds[position])
            below = self._children.get(position, [])
            if kind is Kind.compiled:
                if position not in self._in_compiled and not self._any_below(position, {Kind.triton}):
                    self._found.append(position)
                self._in_compiled.update(self._below(position))
            if kind in (Kind.container, Kind.mark, Kind.compiled) or (
                kind is Kind.hidden and self._operators_below(position)
            ):
                self._selection.wrappers[of._texts[of._names[position]]] += 1
                stack += below
            elif kind is Kind.operator and not self._roots and of._transparent[position]:
                stack += self._through(position, below)
            else:
                if kind is Kind.idle:
                    self._selection.dropped[of._texts[of._names[position]]] += 1
                else:
                    self._found.append(position)
                self._close(position)

    def _through(self, position: int, below: list[int]) -> list[int]:
        """The nodes that replace an operator which gives way; the operator itself if they are not all of its work."""
        of = self._of
        made = set(of._made[of._made_first[position] : of._made_first[position + 1]])
        handled = of._ids[position] in of._handled
        if made <= self._returned_below(position) and (not handled or self._any_below(position, _WORK | {Kind.idle})):
            if not self._operators_below(position):
                self._selection.dropped[of._texts[of._names[position]]] += 1
            return below
        self._found.append(position)
        self._close(position)
        return []

    def _below(self, position: int) -> Iterable[int]:
        stack = list(self._children.get(position, ()))
        while stack:
            each = stack.pop()
            yield each
            stack += self._children.get(each, ())

    def _close(self, position: int) -> None:
        """A chosen node represents everything below it."""
        for each in self._below(position):
            self.seen += 1
            self._selection.inside[each] = 1
        for copy in self._of._kept.of(self._of._ids[position]):
            self._selection.inside[copy] = 0
            self._selection.before[copy] = self._of._ids[position]
            self._found.append(copy)

    def _operators_below(self, position: int) -> bool:
        return self._any_below(position, _WORK)

    def _any_below(self, position: int, kinds: Collection[Kind]) -> bool:
        return any(self._of._kinds[each] in kinds for each in self._below(position))

    def _returned_below(self, position: int) -> set[int]:
        of = self._of
        return {
            storage
            for each in self._below(position)
            for storage in of._out[of._out_first[each] : of._out_first[each + 1]]
        }

    def finish(self) -> ChosenNodes:
        selection, of = self._selection, self._of
        selection.chosen = array("q", sorted(self._found))
        latest: dict[int, int] = {}
        known: dict[Path, int] = {(): 0}
        named: dict[tuple[str, ...], int] = {(): 0}
        carried: dict[int, Path] = {}
        main = min(filter(None, of._threads), default=0)
        for position in selection.chosen:
            thread, number = of._threads[position], selection.before.get(position, of._ids[position])
            if of._kinds[position] != Kind.compiled:  # recorded after its callees
                selection.ordered &= number >= latest.get(thread, 0)
                latest[thread] = number
            path = self._path_of(position, on_main=thread == main)
            # A thread of autograd's engine is inside of what the thread that it works for does, until it works for
            # another one.
            path = carried[thread] = carried.get(thread, ()) if path is None else path
            if path not in known:
                known[path] = len(selection.paths)
                selection.paths.append(path)
            selection.scopes.append(known[path])
            wrappers = self._wrappers_of(position)
            if wrappers not in named:
                named[wrappers] = len(selection.wrapped)
                selection.wrapped.append(wrappers)
            selection.within.append(named[wrappers])
        return selection

    def _wrappers_of(self, position: int) -> tuple[str, ...]:
        of = self._of
        names: list[str] = []
        above = self._positions.get(of._parents[position])
        # Wrappers form no cycles: every node here was reached from a root.
        while above is not None and of._positions_differ(above):
            name = of._texts[of._names[above]]
            wraps = of._kinds[above] in (Kind.container, Kind.compiled) and name not in _IN_PYTHON
            if wraps and not _ROOTS.match(name):
                names.append(name)
            above = self._positions.get(of._parents[above])
        return tuple(reversed(names))

    def _path_of(self, position: int, *, on_main: bool) -> Path | None:
        """The marks around a node, outermost first; None if its thread does not show them."""
        of = self._of
        marks: list[tuple[int, str]] = []
        forward = 0
        crossed = False
        visited: set[int] = set()
        here: int | None = position
        while here is not None and here not in visited:
            visited.add(here)
            name = of._texts[of._names[here]]
            if of._kinds[here] == Kind.mark:
                marks.append((here, name))
            forward = forward or of._forward[here]
            above = self._positions.get(of._parents[here])
            if above is None or above == here or _ROOTS.match(of._texts[of._names[above]]):
                # At the top of its thread: the thread that it works for is inside of something, too.
                above = self._positions.get(forward) if forward and not crossed else None
                crossed = True
            here = above
        return tuple(reversed(marks)) if marks or forward or on_main else None
