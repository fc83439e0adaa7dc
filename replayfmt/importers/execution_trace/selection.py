"""Copies in an execution trace that belong to autograd, not to the operator that they are children of."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.pytorch.operators import operator_named, tells_allocator
from replayfmt.pytorch.overloads import parse_schema

from ..common.operators import COMPILED_CODE, FUSED_LAYER, collective_layer, is_part, only_moves, only_wraps
from .nodes import USER_SCOPE, TracedTensor, TraceNode, communication, operator_name


class KeptCopies:
    """Copies that autograd makes of a tensor before an in-place operator changes it, for use in the backward pass.

    They are children of the operator but not part of its work. A copy that is not used outside the operator is the
    operator's own.
    """

    def __init__(self) -> None:
        self._under: dict[int, list[tuple[int, TracedTensor, TracedTensor]]] = {}
        self._waiting: dict[tuple[str, int], tuple[int, int, TracedTensor]] = {}
        self._kept: dict[int, list[int]] = defaultdict(list)

    def add(self, position: int, node: TraceNode) -> None:
        """Add the next node of the trace: children come before their parent."""
        copies = self._under.pop(node.id, None)
        if copies is None and not self._waiting and node.name != "aten::clone":
            return  # nearly always
        given = [tensor for _position, tensor in node.inputs.tensors]
        if self._waiting:
            taken = {(each.device, each.storage) for each in given}
            for each in given:
                found = self._waiting.get((each.device, each.storage))
                if found is not None and (found[2].sizes, found[2].type_name) == (each.sizes, each.type_name):
                    del self._waiting[each.device, each.storage]
                    self._kept[found[0]].append(found[1])
            for _position, tensor in node.outputs.tensors:
                if (tensor.device, tensor.storage) not in taken:
                    self._waiting.pop((tensor.device, tensor.storage), None)  # by now another allocation
        returned = [tensor for _position, tensor in node.outputs.tensors]
        if node.name == "aten::clone" and given and returned:
            self._under.setdefault(node.parent, []).append((position, given[0], returned[0]))
        if copies and given and operator_name(node.schema)[0].endswith("_"):
            for copy, source, made in copies:
                if (source.storage, source.sizes) == (given[0].storage, given[0].sizes):
                    self._waiting[made.device, made.storage] = node.id, copy, made

    def of(self, operator: int) -> list[int]:
        """The positions of the copies that belong before an operator, by its id."""
        return self._kept.get(operator, [])


class NodeKind(IntEnum):
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


@lru_cache(maxsize=4096)
def _operator_kind(schema: str) -> NodeKind:
    name = operator_name(schema)[0]
    if tells_allocator(name) or only_wraps(name):
        return NodeKind.idle
    return NodeKind.collective if operator_named(name).collective else NodeKind.operator


def kind_of(node: TraceNode) -> NodeKind:
    """The kind of a node, looked at by itself."""
    if node.kernel_backend == "triton" or (node.kernel_file and not node.schema):
        return NodeKind.triton
    if node.name == "record_param_comms":
        return NodeKind.idle if communication(node).get("collective_name") in ("wait", "init") else NodeKind.collective
    if node.schema:
        kind = _operator_kind(node.schema)
        tensors = node.inputs.tensors or node.outputs.tensors
        if not tensors or tensors[0][1].device != "meta":  # nearly always
            return kind
        everything = (*node.inputs.tensors, *node.outputs.tensors)
        return NodeKind.idle if all(tensor.device == "meta" for _position, tensor in everything) else kind
    if _ROOTS.match(node.name):
        return NodeKind.container
    if COMPILED_CODE.match(node.name):
        return NodeKind.compiled
    if node.scope == USER_SCOPE:
        return NodeKind.mark
    if node.name in _IN_PYTHON:
        return NodeKind.container
    if not _IDLE.match(node.name) and node.inputs.tensors:
        return NodeKind.hidden
    return NodeKind.container


_WORK = frozenset({NodeKind.operator, NodeKind.collective, NodeKind.triton})
NEVER_CHOSEN = frozenset({NodeKind.container, NodeKind.mark, NodeKind.idle})
MarkPath = tuple[tuple[int, str], ...]
_MOST_AROUND = 64  # marks, and wrappers, around one node; in real traces there are fewer than ten


class _Fate(IntEnum):
    """What became of a node."""

    wrapper = 0
    mark = 1
    taken = 2
    inside = 3  # of a taken node
    around = 4  # an operator replaced by its callees
    idle = 5


@dataclass
class ChosenNodes:
    """`chosen` has the position of every node that is imported, in the order of the trace, `scopes` for each the marks
    around it, outermost first (an index into `paths`, which have the position and the name of each mark). `within`
    likewise tells the names of what is around it and is neither a mark nor an operator (into `wrapped`). `dropped`
    counts what did no work, by name, `in_collectives` operators that a collective represents. `fates` says what became
    of each node. `before` names for some chosen nodes the id of the one that they ran before, whatever their own says.
    `ordered`: the trace has the chosen nodes in the order in which they ran. `problems` are sentences on what is wrong
    with the trace."""

    chosen: array = field(default_factory=lambda: array("q"))
    scopes: array = field(default_factory=lambda: array("q"))
    paths: list[MarkPath] = field(default_factory=lambda: [()])
    within: array = field(default_factory=lambda: array("q"))
    wrapped: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    dropped: Counter[str] = field(default_factory=Counter)
    in_collectives: Counter[str] = field(default_factory=Counter)
    fates: bytearray = field(default_factory=bytearray)
    before: dict[int, int] = field(default_factory=dict)
    ordered: bool = True
    problems: list[str] = field(default_factory=list)

    def inside(self, position: int) -> bool:
        return self.fates[position] == _Fate.inside

    def path_of(self, position: int) -> MarkPath:
        """The marks around a chosen node."""
        return self.paths[self.scopes[bisect_left(self.chosen, position)]]

    def wrappers_of(self, position: int) -> tuple[str, ...]:
        """The names of the wrappers around a chosen node, outermost first."""
        return self.wrapped[self.within[bisect_left(self.chosen, position)]]

    def counts(self) -> dict[str, int]:
        """How many nodes there are, and how many of each fate: the operators are the sum of the four after them."""
        found = Counter(self.fates)
        fates = (_Fate.taken, _Fate.inside, _Fate.around, _Fate.idle)
        return {
            "nodes": len(self.fates),
            "operators": sum(found[fate] for fate in fates),
            "taken": found[_Fate.taken],
            "inside taken": found[_Fate.inside],
            "around taken": found[_Fate.around],
            "no work": found[_Fate.idle],
            "wrappers": found[_Fate.wrapper],
            "annotations": found[_Fate.mark],
        }


_COMPUTES = 1 << len(NodeKind)  # bits of what is below a node, after those of the kinds
_LAYER = _COMPUTES << 1


def _bits(*kinds: NodeKind) -> int:
    return sum(1 << kind for kind in kinds)


_WORK_BITS = _bits(*_WORK)


class NodeTable:
    """What the selection needs of each node, gathered in one pass over the trace."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids, self._parents, self._threads = array("q"), array("q"), array("q")
        self._forward, self._kinds, self._names = array("q"), array("b"), array("q")
        self._made_first, self._made = array("q", [0]), array("q")  # storages an operator returns, not given to it
        self._out_first, self._out = array("q", [0]), array("q")  # every storage it returns
        self._own = array("q")  # the node's bits
        self._name_ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._ways: dict[str, tuple[bool, bool]] = {}
        self._transparent = array("b")
        self._kept = KeptCopies()
        self._handled = set[int]()  # ids of what Python handled

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, node: TraceNode) -> NodeKind:
        """Add the next node of the trace. Returns its kind, looked at by itself."""
        kind = kind_of(node)
        self._kept.add(len(self._ids), node)
        self._ids.append(node.id)
        self._parents.append(node.parent)
        self._threads.append(node.thread)
        self._forward.append(node.forward)
        self._kinds.append(kind)
        self._names.append(self._name(node.name))
        if node.name in _IN_PYTHON:
            self._handled.add(node.parent)
        gives_way, moves = self._ways_of(node.schema) if kind is NodeKind.operator else (False, False)
        transparent = kind is NodeKind.operator and (node.id in self._handled or gives_way)
        self._transparent.append(transparent)
        bits = 1 << kind
        if (kind is NodeKind.operator and not moves) or kind is NodeKind.triton:
            bits |= _COMPUTES
        elif kind is NodeKind.collective:
            bits |= _LAYER << collective_layer(node.schema or node.name)
        self._own.append(bits)
        if kind in (NodeKind.operator, NodeKind.collective):
            returned = [tensor.storage for _position, tensor in node.outputs.tensors if tensor.elements]
            self._out.extend(returned)
            if transparent:
                given = {tensor.storage for _position, tensor in node.inputs.tensors}
                self._made.extend(storage for storage in returned if storage not in given)
        self._made_first.append(len(self._made))
        self._out_first.append(len(self._out))
        return kind

    def _name(self, text: str) -> int:
        number = self._name_ids.get(text)
        if number is None:
            number = self._name_ids[text] = len(self._texts)
            self._texts.append(text)
        return number

    def _ways_of(self, text: str) -> tuple[bool, bool]:
        """Whether an operator works by calling others, and whether it only moves elements."""
        known = self._ways.get(text)
        if known is None:
            try:
                schema = parse_schema(text)
            except (RuntimeError, ValueError):
                schema = None
            name, overload = operator_name(text)
            known = self._ways[text] = gives_way(name, overload), only_moves(name, schema)
        return known

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

    def select(self, *, roots: bool = False) -> ChosenNodes:
        """Choose the nodes. With `roots`, the outermost operators. Raises InvalidCapture if parents form a cycle."""
        walk = _NodeWalk(self, roots)
        if len(walk.order) != len(self._ids):
            raise InvalidCapture(
                f"{self._path}: {len(self._ids) - len(walk.order)} nodes of the execution trace are their "
                "own ancestors; the trace is damaged"
            )
        walk.problems += self._damage(walk.positions)
        walk.visit()
        return walk.finish()


class _NodeWalk:
    """From the roots down, in the order of the trace.

    `order` has every node after the one around it, with all that is below it until `_end`, so that questions about
    what is below a node need no search: a trace may nest as deep as it is long.
    """

    def __init__(self, skeleton: NodeTable, roots: bool) -> None:
        self._of, self._roots = skeleton, roots
        self._found: list[int] = []
        self._selection = ChosenNodes(fates=bytearray(len(skeleton)))
        self.problems = self._selection.problems
        self.positions = {number: position for position, number in enumerate(skeleton._ids)}
        self._children: dict[int, list[int]] = defaultdict(list)
        self._above = array("q")
        self._tops: list[int] = []
        for position, parent in enumerate(skeleton._parents):
            above = self.positions.get(parent, position)
            self._above.append(-1 if above == position else above)
            (self._tops if above == position else self._children[above]).append(position)
        self.order, self._place, self._end = array("q"), array("q", bytes(8 * len(skeleton))), array("q")
        stack = self._tops[::-1]
        while stack:
            position = stack.pop()
            self._place[position] = len(self.order)
            self.order.append(position)
            stack += reversed(self._children.get(position, ()))
        self._end = array("q", range(1, len(self.order) + 1))  # by place in the order
        self._below_bits = array("q", bytes(8 * len(skeleton)))
        for place in range(len(self.order) - 1, -1, -1):
            position = self.order[place]
            above = self._above[position]
            if above >= 0:
                self._below_bits[above] |= self._below_bits[position] | skeleton._own[position]
                around = self._place[above]
                self._end[around] = max(self._end[around], self._end[place])
        self._returns: dict[int, list[int]] | None = None

    def visit(self) -> None:
        of, fates, dropped = self._of, self._selection.fates, self._selection.dropped
        stack = [(position, -1, False) for position in self._tops]  # with the collective and the compiled code around
        while stack:
            position, layer, compiled = stack.pop()
            kind = of._kinds[position]
            below = self._children.get(position, [])
            if kind == NodeKind.compiled:
                if not compiled and not self._any_below(position, _bits(NodeKind.triton)):
                    self._take(position)
                compiled = True
            if kind in (NodeKind.container, NodeKind.mark, NodeKind.compiled) or (
                kind == NodeKind.hidden and self._any_below(position, _WORK_BITS)
            ):
                if fates[position] != _Fate.taken:
                    fates[position] = _Fate.mark if kind == NodeKind.mark else _Fate.wrapper
            elif (
                kind == NodeKind.operator and not self._roots and of._transparent[position] and self._covered(position)
            ):
                idle = not self._any_below(position, _WORK_BITS)
                fates[position] = _Fate.idle if idle else _Fate.around
                dropped[of._texts[of._names[position]]] += idle
            elif kind == NodeKind.collective:
                below, layer = self._collective(position, below, layer)
            else:
                if kind == NodeKind.idle:
                    fates[position] = _Fate.idle
                    dropped[of._texts[of._names[position]]] += 1
                else:
                    self._take(position)
                self._close(position)
                below = []
            stack += ((each, layer, compiled) for each in below)
        self._selection.dropped = +dropped

    def _take(self, position: int) -> None:
        self._found.append(position)
        self._selection.fates[position] = _Fate.taken

    def _collective(self, position: int, below: list[int], around: int) -> tuple[list[int], int]:
        """Take a collective, unless it is a part of the one around it. One that was still going on as the program
        went on has the program's operators below it: these are returned."""
        of, names = self._of, self._selection.in_collectives
        layer = (of._own[position] // _LAYER).bit_length() - 1
        if is_part(layer, around):
            self._selection.fates[position] = _Fate.inside
        else:
            self._take(position)
        others = sum(_LAYER << each for each in range(1, FUSED_LAYER + 1) if not is_part(each, layer))
        if layer < FUSED_LAYER and self._any_below(position, _COMPUTES | others):
            return below, max(layer, around)
        self._close(position)
        for each in self._below(position):
            if of._kinds[each] in (NodeKind.operator, NodeKind.triton):
                names[of._texts[of._names[each]]] += 1
        return [], around

    def _covered(self, position: int) -> bool:
        """Whether an operator that gives way may: the nodes below it returned all that it returned."""
        of = self._of
        if of._ids[position] in of._handled and not self._any_below(position, _WORK_BITS | _bits(NodeKind.idle)):
            return False
        made = of._made[of._made_first[position] : of._made_first[position + 1]]
        if made and self._returns is None:
            self._returns = defaultdict(list)
            for place, each in enumerate(self.order):
                for storage in of._out[of._out_first[each] : of._out_first[each + 1]]:
                    self._returns[storage].append(place)
        first, end = self._place[position] + 1, self._end[self._place[position]]
        for storage in made:
            assert self._returns is not None
            places = self._returns[storage]
            found = bisect_left(places, first)
            if found == len(places) or places[found] >= end:
                return False
        return True

    def _below(self, position: int) -> Iterable[int]:
        place = self._place[position]
        return self.order[place + 1 : self._end[place]]

    def _close(self, position: int) -> None:
        """A chosen node represents everything below it."""
        fates = self._selection.fates
        for each in self._below(position):
            fates[each] = _Fate.inside
        for copy in self._of._kept.of(self._of._ids[position]):
            self._selection.before[copy] = self._of._ids[position]
            self._take(copy)

    def _any_below(self, position: int, bits: int) -> bool:
        return bool(self._below_bits[position] & bits)

    def finish(self) -> ChosenNodes:
        selection, of = self._selection, self._of
        selection.chosen = array("q", sorted(self._found))
        latest: dict[int, int] = {}
        marks, wrappers, forward = self._around()
        known: dict[MarkPath, int] = {(): 0}
        carried: dict[int, MarkPath] = {}
        main = min(filter(None, of._threads), default=0)
        for position in selection.chosen:
            thread, number = of._threads[position], selection.before.get(position, of._ids[position])
            if of._kinds[position] != NodeKind.compiled:  # recorded after its callees
                selection.ordered &= number >= latest.get(thread, 0)
                latest[thread] = number
            path, works_for = marks[position], self.positions.get(forward[position], -1)
            if (
                forward[position] and works_for >= 0
            ):  # at the top of its thread: the thread that it works for is inside of something, too
                mark = ((works_for, of._texts[of._names[works_for]]),) if of._kinds[works_for] == NodeKind.mark else ()
                path = (marks[works_for] + mark + path)[:_MOST_AROUND]
            # A thread of autograd's engine is inside of what the thread that it works for does, until it works for
            # another one.
            if not path and not forward[position] and thread != main:
                path = carried.get(thread, ())
            carried[thread] = path
            if path not in known:
                known[path] = len(selection.paths)
                selection.paths.append(path)
            selection.scopes.append(known[path])
            selection.within.append(wrappers[position])
        return selection

    def _around(self) -> tuple[list[MarkPath], array, array]:
        """For each node the marks around it, the number of its wrappers in `wrapped`, and the id of the node of
        another thread that it works for, 0 if there is none."""
        of, wrapped = self._of, self._selection.wrapped
        named: dict[tuple[str, ...], int] = {(): 0}
        marks: list[MarkPath] = [()] * len(of)
        wrappers, forward = array("q", bytes(8 * len(of))), array("q", of._forward)
        left_out = 0
        for position in self.order:
            above = self._above[position]
            if above < 0:
                continue
            forward[position] = forward[position] or forward[above]
            marks[position], wrappers[position] = marks[above], wrappers[above]
            name, kind = of._texts[of._names[above]], of._kinds[above]
            if kind == NodeKind.mark:
                full = len(marks[above]) >= _MOST_AROUND
                left_out += full
                marks[position] = marks[above] if full else self._under(marks, above, name)
            elif kind in (NodeKind.container, NodeKind.compiled) and name not in _IN_PYTHON and not _ROOTS.match(name):
                around = wrapped[wrappers[above]]
                if of._ids[above] != of._parents[above] and len(around) < _MOST_AROUND:
                    inner = (*around, name)
                    if inner not in named:
                        named[inner] = len(wrapped)
                        wrapped.append(inner)
                    wrappers[position] = named[inner]
        if left_out:
            self.problems.append(f"marks nested more than {_MOST_AROUND} deep: the deeper ones are left out")
        return marks, wrappers, forward

    def _under(self, marks: list[MarkPath], mark: int, name: str) -> MarkPath:
        """The path of everything directly inside a mark, made once."""
        first = self._children[mark][0]
        known = marks[first]
        return known if known and known[-1][0] == mark else (*marks[mark], (mark, name))
