"""Which parameters of a kernel may be written and read.

`accesses_of` tells from the source of the kernel and of what it calls, `ir_accesses` from Triton's intermediate code of
a compiled kernel. Imports no torch.
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType, ModuleType
from typing import Any, TypeGuard

from .sources import MISSING, KernelFunction, StandaloneSource, is_callable_of_triton

_Places = frozenset[int]
# Return what is in memory, not where it is, and write nothing.
_IR_LOADS = frozenset({"tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.load_tensor_descriptor"})
_IR_WRITES = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_scatter"})
_IR_STORES = frozenset({"tt.store", "tt.descriptor_store"})  # write, and read nothing
# Dialects of arithmetic, and what Triton's own operations do that write nothing.
_PURE_DIALECTS = ("arith.", "math.", "scf.", "cf.", "ub.")
# fmt: off
_IR_PURE = frozenset({
    "tt.addptr", "tt.advance", "tt.assert", "tt.assume", "tt.bitcast", "tt.broadcast", "tt.call", "tt.cat", "tt.clampf",
    "tt.dot", "tt.dot_scaled", "tt.expand_dims", "tt.fp_to_fp", "tt.func", "tt.gather",
    "tt.get_num_programs", "tt.get_program_id", "tt.histogram", "tt.join", "tt.make_range",
    "tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.map_elementwise", "tt.map_elementwise.return", "tt.mulhiui",
    "tt.precise_divf", "tt.precise_sqrt", "tt.print", "tt.ptr_to_int", "tt.reduce", "tt.reduce.return", "tt.reshape",
    "tt.return", "tt.scan", "tt.scan.return", "tt.splat", "tt.split", "tt.trans", "tt.unsplat",
})
# fmt: on
_MADE = frozenset({"tt.int_to_ptr"})
# Hand values out of the region that they are in.
_LEAVES = frozenset({"scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"})


class NotRead(Exception):
    """The intermediate code is of a form that is not known."""


@dataclass(frozen=True)
class IrAccesses:
    """`written` and `read`: the places of the function's arguments that it may write and read, of `count`. `stored`:
    those of `written` that reach an operation that writes; of the others it is only not known that they do not.
    `makes_pointers`: it turns integers into pointers, so that it may read and write anything."""

    written: _Places
    stored: _Places
    read: _Places
    count: int
    makes_pointers: bool


@dataclass
class _Operation:
    name: str
    operands: list[int]
    results: list[int]
    block: int
    regions: list[int]
    callee: str = ""


@dataclass
class _Module:
    """The operations of a module, inner ones first. `arguments`: of each block; `region_of`: each block's region."""

    operations: list[_Operation] = field(default_factory=list)
    arguments: dict[int, list[int]] = field(default_factory=dict)
    region_of: dict[int, int] = field(default_factory=dict)
    functions: dict[str, list[int]] = field(default_factory=dict)

    def entry_arguments(self, function: str) -> list[int]:
        """The arguments of a function. Raises NotRead if there is none of that name."""
        for region in self.functions.get(function, ()):
            for block in self._blocks[region]:
                return self.arguments[block]
        raise NotRead(f"it has no function {function}")

    def insides(self, operation: _Operation) -> tuple[list[list[int]], list[int]]:
        """The values that leave each of an operation's regions, and the arguments of all their blocks."""
        blocks = [block for region in operation.regions for block in self._blocks[region]]
        ends = [each.operands for block in blocks for each in self._inside[block] if each.name in _LEAVES]
        return ends, [argument for block in blocks for argument in self.arguments[block]]

    def targets(self, branch: _Operation) -> list[int]:
        """The arguments of the blocks that a branch may go to."""
        blocks = self._blocks[self.region_of[branch.block]]
        return [argument for block in blocks[1:] for argument in self.arguments[block]]

    @cached_property
    def _blocks(self) -> dict[int, list[int]]:
        """Of each region, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for block, region in self.region_of.items():
            found[region].append(block)
        return found

    @cached_property
    def _inside(self) -> dict[int, list[_Operation]]:
        """The operations of each block."""
        found: dict[int, list[_Operation]] = defaultdict(list)
        for operation in self.operations:
            found[operation.block].append(operation)
        return found


def ir_accesses(ttir: str) -> IrAccesses:
    """What the kernel of a module does with its arguments. Raises NotRead."""
    try:
        module, entry = _read(ttir)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise NotRead(f"Triton cannot read its own intermediate code ({error})") from error
    return _follow(module, entry)


def _read(ttir: str) -> tuple[_Module, str]:
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ttir")
        with open(path, "w", encoding="utf-8") as file:
            file.write(ttir)
        parsed = ir.parse_mlir_module(path, context)
    module = _Module()

    def note(operation: Any) -> None:
        name = operation.get_name()
        if name == "builtin.module":
            return
        block = operation.get_block()
        number = block.id()
        if number not in module.arguments:
            count = block.get_num_arguments()
            module.arguments[number] = [block.get_argument(i).id() for i in range(count)]
            module.region_of[number] = block.get_parent().id()
        regions = [operation.get_region(i).id() for i in range(operation.get_num_regions())]
        noted = _Operation(
            name,
            [operation.get_operand(i).id() for i in range(operation.get_num_operands())],
            [operation.get_result(i).id() for i in range(operation.get_num_results())],
            number,
            regions,
            operation.get_flat_symbol_ref_attr("callee") if name == "tt.call" else "",
        )
        module.operations.append(noted)
        if name == "tt.func":
            module.functions[operation.get_str_attr("sym_name")] = regions

    parsed.walk(note)
    return module, parsed.get_entry_func_name()


def _follow(module: _Module, entry: str) -> IrAccesses:
    entry_arguments = module.entry_arguments(entry)
    flow = _Flow(module)
    for place, argument in enumerate(entry_arguments):
        flow.held[argument].add(place)
    while any([flow.through(operation) for operation in module.operations]):
        pass
    written: set[int] = set()
    stored: set[int] = set()
    read: set[int] = set()
    for operation in module.operations:
        name = operation.name
        if name not in _IR_PURE and name not in _IR_LOADS and not name.startswith(_PURE_DIALECTS):
            operands = operation.operands[:1] if name in _IR_WRITES else operation.operands
            written.update(*(flow.held[each] for each in operands))
            stored.update(*(flow.held[each] for each in operands if name in _IR_WRITES))
        if name in _IR_LOADS or (
            name not in _IR_PURE and name not in _IR_STORES and not name.startswith(_PURE_DIALECTS)
        ):
            read.update(*(flow.held[each] for each in operation.operands))
    made = any(operation.name in _MADE for operation in module.operations)
    return IrAccesses(frozenset(written), frozenset(stored), frozenset(read), len(entry_arguments), made)


class _Flow:
    """`held`: the places of the pointers that each value may be made of, as far as is known so far."""

    def __init__(self, module: _Module) -> None:
        self._module = module
        self.held: dict[int, set[int]] = defaultdict(set)

    def through(self, operation: _Operation) -> bool:
        """Follow the values through an operation. Returns whether anything new was found."""
        operands, results = operation.operands, operation.results
        ends, inside = self._module.insides(operation)
        if operation.name == "tt.func" or operation.name in _IR_LOADS:
            return False
        if operation.name == "tt.call":
            parameters = self._module.entry_arguments(operation.callee)
            if len(parameters) != len(operands):
                raise NotRead(f"it calls {operation.callee} with other arguments than that takes")
            pairs = [([parameter], [operand]) for parameter, operand in zip(parameters, operands, strict=True)]
            pairs.append((results, operands))
        elif operation.name == "scf.for" and len(inside) == len(results) + 1:
            given = operands[len(operands) - len(results) :]
            pairs = [
                ([inside[place + 1], result], [given[place], *(end[place] for end in ends)])
                for place, result in enumerate(results)
            ]
        elif operation.name == "scf.if":
            pairs = [([result], [end[place] for end in ends]) for place, result in enumerate(results)]
        elif operation.name.startswith("cf."):
            pairs = [(self._module.targets(operation), operands)]
        else:
            pairs = [([*results, *inside], [*operands, *(value for end in ends for value in end)])]
        return any([self._give(targets, sources) for targets, sources in pairs])

    def _give(self, targets: list[int], sources: list[int]) -> bool:
        """Each target may be made of any source. Returns whether that is new."""
        added = {place for source in sources for place in self.held[source]}
        new = [target for target in targets if not added <= self.held[target]]
        for target in new:
            self.held[target] |= added
        return bool(new)


_Names = frozenset[str]
_NONE: _Names = frozenset()
# Return what is in memory, not where it is.
_LOADS = frozenset({"load", "gather", "load_tensor_descriptor", "_experimental_descriptor_load", "atomic_load"})
_STORE = "store"  # writes, and reads nothing
# fmt: off
# Write. What else writes is not told from what may.
_WRITES = frozenset({
    _STORE, "scatter", "store_tensor_descriptor", "_experimental_descriptor_store",
    "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or", "atomic_xchg", "atomic_xor",
})
# fmt: on
# May be given pointers, and neither read nor write.
# fmt: off
_PURE = frozenset({
    "program_id", "num_programs", "arange", "cast", "to", "broadcast", "broadcast_to", "expand_dims", "reshape",
    "view", "trans", "permute", "where", "ravel", "make_block_ptr", "advance", "make_tensor_descriptor",
    "multiple_of", "max_contiguous", "max_constancy", "assume", "static_assert", "static_print", "device_assert",
    "device_print", "range", "static_range", "cdiv", "len", "isinstance", "print", "int", "float", "bool", "min",
    "max", "zeros", "full", "constexpr", "tensor",
})
# fmt: on
# What a pointer is, not where it points to.
_FACTS = frozenset({"dtype", "element_ty"})
_TYPES = frozenset({"dtype", "type"})
_CASTS = frozenset({"to", "cast"})
_MENTIONED = re.compile(r"\b(pointer_type|int_to_ptr|str_to_ty)\b")
_OPAQUE = (ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Try, ast.With)


class _Unknown(Exception):
    """The function has something that is not followed."""


@dataclass(frozen=True)
class Accesses:
    """What a kernel does with its parameters. `written`: those that it may write, `read`: may read, None if that is not
    known. `stored`: those of `written` that reach something that writes; of the others it is only not known that they
    do not. `makes_pointers`: it turns integers into pointers, so that it may read and write anything; so it does if one
    of `casts_to`, to whose type it turns something, is a pointer."""

    written: _Names | None
    stored: _Names
    makes_pointers: bool
    casts_to: _Names
    read: _Names | None


def accesses_of(source: StandaloneSource, constants: Mapping[str, Any] = MappingProxyType({})) -> Accesses:
    """The accesses of a module's kernel. `constants`: values of its constexprs, which decide on branches."""
    found = _Found(constants)
    # Where something is not followed, a mention of pointer types is all that there is to see.
    mentioned = any(map(_mentions_pointers, source.functions.values()))
    try:
        summary = found.function(source.functions[source.name])
    except (_Unknown, RecursionError):
        return Accesses(None, _NONE, mentioned, _NONE, None)
    return Accesses(summary.written, summary.stored, mentioned, summary.casts_to, summary.read)


@dataclass(frozen=True)
class _Summary:
    """Of one function: the parameters that it may write (`stored`: see `Accesses`) and read, those that its result may
    point into, and those to whose type it turns something."""

    written: _Names
    stored: _Names
    read: _Names
    returned: _Names
    casts_to: _Names


class _Found:
    """What was found so far, by function. `constants` are those of the one that is asked for first, the kernel."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._constants: Mapping[str, Any] = constants
        self._summaries: dict[int, _Summary] = {}
        self._running: set[int] = set()

    def function(self, function: KernelFunction) -> _Summary:
        key = id(function.function)
        if key not in self._summaries:
            if key in self._running:
                raise _Unknown("a function that calls itself")
            constants = {} if self._running else self._constants
            self._running.add(key)
            self._summaries[key] = _Body(self, function, constants).summary()
            self._running.discard(key)
        return self._summaries[key]


class _Body:
    """One function. `held`: the parameters that each local variable may point into."""

    def __init__(self, found: _Found, function: KernelFunction, constants: Mapping[str, Any]) -> None:
        self._found, self._function = found, function
        assigned = {node.id for node in ast.walk(function.tree) if isinstance(node, ast.Name) and _is_stored(node)}
        self._constants = {name: value for name, value in constants.items() if name not in assigned}
        self._outer = {name: function.value_of(name) for name in function.outer_names}
        parameters = tuple(function.signature.parameters)
        self._held: dict[str, _Names] = {name: frozenset({name}) for name in parameters}
        self._written: _Names = _NONE
        self._stored: _Names = _NONE
        self._read: _Names = _NONE
        self._returned: _Names = _NONE
        self._casts_to: _Names = _NONE

    def summary(self) -> _Summary:
        if any(isinstance(node, _OPAQUE) for statement in self._function.tree.body for node in ast.walk(statement)):
            raise _Unknown("something other than plain statements")
        while True:
            before = (dict(self._held), self._so_far())
            for statement in self._function.tree.body:
                self._statement(statement)
            if before == (self._held, self._so_far()):
                return self._so_far()

    def _so_far(self) -> _Summary:
        return _Summary(self._written, self._stored, self._read, self._returned, self._casts_to)

    def _reached(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node and those inside it, but for branches that the constants rule out."""
        taken = decided(node.test, self._constants) if isinstance(node, ast.If) else None
        yield node
        for name, child in ast.iter_fields(node):
            if name != {None: "", True: "orelse", False: "body"}[taken]:
                for each in child if isinstance(child, list) else [child]:
                    if isinstance(each, ast.AST):
                        yield from self._reached(each)

    def _statement(self, statement: ast.stmt) -> None:
        for node in self._reached(statement):
            match node:
                case ast.Assign():
                    for target in node.targets:
                        self._assign(target, self._value(node.value))
                case ast.AnnAssign(value=value) if value is not None:
                    self._assign(node.target, self._value(value))
                case ast.AugAssign() | ast.NamedExpr():
                    self._assign(node.target, self._value(node.value))
                case ast.For() | ast.comprehension():
                    self._assign(node.target, self._value(node.iter))
                case ast.Return(value=value) if value is not None:
                    self._returned |= self._value(value)
                case ast.Call():
                    self._value(node)
                case ast.Delete() | ast.AsyncFor() | ast.AsyncWith() | ast.Await() | ast.Yield() | ast.YieldFrom():
                    raise _Unknown("a statement that kernels do not have")

    def _assign(self, target: ast.expr, value: _Names) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._held[node.id] = self._held.get(node.id, _NONE) | value

    def _value(self, node: ast.AST) -> _Names:
        """The parameters that an expression's value may point into."""
        match node:
            case ast.Name(id=name):
                return self._held.get(name, _NONE)
            case ast.Attribute(attr=name, value=inner) if name in _FACTS:
                self._value(inner)
                return _NONE
            case ast.Call():
                return self._call(node)
            case ast.Compare():
                for child in ast.iter_child_nodes(node):
                    self._value(child)
                return _NONE
        return self._all(list(ast.iter_child_nodes(node)))

    def _all(self, nodes: list[Any]) -> _Names:
        return frozenset().union(*(self._value(each) for each in nodes)) if nodes else _NONE

    def _call(self, call: ast.Call) -> _Names:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        name, callee, receiver = self._callee(call.func)
        given = self._all(values) | receiver
        if name in _CASTS:
            self._casts_to |= self._all([each.value for each in values if _is_type(each)])
        if is_callable_of_triton(callee) and not _is_tritons(callee):
            return self._inside(call, callee)
        if name in _LOADS:
            self._read |= given
            return _NONE
        if name in _WRITES:
            self._stored |= given
        if name not in _PURE:
            self._written |= given
            self._read |= given if name != _STORE else _NONE
        return given

    def _callee(self, function: ast.expr) -> tuple[str, Any, _Names]:
        """The name of what is called, the function if it is known, and what the object points into whose method it
        is."""
        if isinstance(function, ast.Name):
            value = MISSING if function.id in self._held else self._outer.get(function.id, MISSING)
            known = value is MISSING and function.id not in self._held  # one of Python's
            home = _is_tritons(value)
            return (
                (getattr(value, "__name__", function.id) if home else function.id) if known or home else "",
                value,
                self._held.get(function.id, _NONE),
            )
        if isinstance(function, ast.Attribute):
            module = self._module(function.value)
            if module is None:
                return function.attr, MISSING, self._value(function.value)
            value = getattr(module, function.attr, MISSING)
            return (function.attr if _is_tritons(value) else ""), value, _NONE
        return "", MISSING, self._value(function)

    def _module(self, node: ast.expr) -> ModuleType | None:
        """The module that an expression names."""
        if isinstance(node, ast.Name):
            value = MISSING if node.id in self._held else self._outer.get(node.id, MISSING)
        elif isinstance(node, ast.Attribute) and (outer := self._module(node.value)) is not None:
            value = getattr(outer, node.attr, MISSING)
        else:
            return None
        return value if isinstance(value, ModuleType) else None

    def _inside(self, call: ast.Call, callee: Any) -> _Names:
        """A call of another function of the kernel."""
        function = KernelFunction.of(callee)
        summary = self._found.function(function)
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            given = self._all([*call.args, *(each.value for each in call.keywords)])
            self._written |= given if summary.written else _NONE
            self._read |= given if summary.read else _NONE
            self._casts_to |= given if summary.casts_to else _NONE
            return given
        names = list(function.signature.parameters)
        passed: Mapping[str, ast.expr] = {
            **dict(zip(names, call.args, strict=False)),
            **{str(keyword.arg): keyword.value for keyword in call.keywords},
        }
        self._written |= self._all([passed[name] for name in summary.written if name in passed])
        self._stored |= self._all([passed[name] for name in summary.stored if name in passed])
        self._read |= self._all([passed[name] for name in summary.read if name in passed])
        self._casts_to |= self._all([passed[name] for name in summary.casts_to if name in passed])
        return self._all([passed[name] for name in summary.returned if name in passed])


def _mentions_pointers(function: KernelFunction) -> bool:
    """Whether a function may turn integers into pointers: the code says so, or something that it uses by another name.
    What comments and the annotations of parameters say turns nothing."""
    arguments = function.tree.args
    code = [*function.tree.body, *arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
    names = [getattr(function.value_of(name), "__name__", "") for name in function.outer_names]
    return any(_MENTIONED.search(text) for text in (*map(ast.unparse, code), *names))


def decided(test: ast.expr, constants: Mapping[str, Any]) -> bool | None:
    """Whether a condition holds, None if the constants do not decide it."""
    match test:
        case ast.Name(id=name) if name in constants:
            return bool(constants[name])
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            holds = decided(inner, constants)
            return None if holds is None else not holds
        case ast.BoolOp(op=joined, values=parts):
            found = [decided(part, constants) for part in parts]
            short = isinstance(joined, ast.Or)
            return short if short in found else None if None in found else not short
        case ast.Compare(left=ast.Name(id=name), ops=[compared], comparators=[ast.Constant(value=other)]):
            if name in constants and (isinstance(compared, ast.Eq) or (isinstance(compared, ast.Is) and other is None)):
                return bool(constants[name] == other)
            if name in constants and (
                isinstance(compared, ast.NotEq) or (isinstance(compared, ast.IsNot) and other is None)
            ):
                return bool(constants[name] != other)
    return None


def _is_stored(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _is_type(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether an expression is the type of another, not of what that points to."""
    return isinstance(node, ast.Attribute) and node.attr in _TYPES


def _is_tritons(value: Any) -> bool:
    """Whether Triton itself defines a function."""
    module = getattr(getattr(value, "fn", value), "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "triton"
