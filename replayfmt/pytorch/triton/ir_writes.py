"""Which parameters a compiled kernel may write and read, from Triton's intermediate code.

Followed is which of the function's pointers each value may be made of. An operation that is given a pointer counts as
writing to it, unless it is known that it does not; what a load returns is no pointer.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_Places = frozenset[int]
# Return what is in memory, not where it is, and write nothing.
_LOADS = frozenset({"tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.load_tensor_descriptor"})
_WRITES = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_scatter"})
_STORES = frozenset({"tt.store", "tt.descriptor_store"})  # write, and read nothing
# Dialects of arithmetic, and what Triton's own operations do that write nothing.
_PURE_DIALECTS = ("arith.", "math.", "scf.", "cf.", "ub.")
# fmt: off
_PURE = frozenset({
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
        if name not in _PURE and name not in _LOADS and not name.startswith(_PURE_DIALECTS):
            operands = operation.operands[:1] if name in _WRITES else operation.operands
            written.update(*(flow.held[each] for each in operands))
            stored.update(*(flow.held[each] for each in operands if name in _WRITES))
        if name in _LOADS or (name not in _PURE and name not in _STORES and not name.startswith(_PURE_DIALECTS)):
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
        if operation.name == "tt.func" or operation.name in _LOADS:
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
