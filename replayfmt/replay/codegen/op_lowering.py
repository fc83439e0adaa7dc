"""Lowering one op: its line of code, the variables it defines and the variables it releases.

`lower_watched` lowers chosen ops with calls of an observer right before and right after them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from replayfmt.errors import ReplayRefused
from replayfmt.format.signature_layout import NodePlace
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.tensors.composites import take_apart
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, require_inside

from ..operations import (
    DrawOnHost,
    MustRaise,
    PassAddresses,
    call_custom,
    checked_nested,
    checked_view,
    requiring_gradients,
    storage_of,
    unattached,
    unpack_composite,
)
from ..planning.kernels import CallSite, leaves_unwritten
from ..verification import CompareLocation, ExpectedTensor, ExpectResults
from .call_templates import Leaf, Operand, Result, Template
from .lowering import Lowering


def lower_op(lowering: Lowering, row: int, ordinal: int) -> None:
    """Write the code of one op. Ops without an operator here are left out; their results stay undefined."""
    signature = lowering.frame.signatures[row]
    template = lowering.template(signature)
    if template is None:
        _settle_missing(lowering, signature, row)
    else:
        OpLine(lowering, template, row, ordinal).write()


def lower_result(lowering: Lowering, row: int, ordinal: int) -> None:
    """Write an op as a window that returns the op's result."""
    template = lowering.template(lowering.frame.signatures[row])
    if template is not None:
        OpLine(lowering, template, row, ordinal).write_return()


def _settle_missing(lowering: Lowering, signature: int, row: int) -> None:
    """Handle an op that cannot be run: memory it would return counts as live, and is missing when it is requested.

    Results on existing memory do not need the op: they are rebuilt from it like other views made without an op.
    """
    frame, variables = lowering.frame, lowering.variables
    first, end = frame.tensor_first[row], frame.tensor_first[row + 1]
    for place in lowering.scan.layout(signature).results:
        for slot in place.tensors:
            if variables.base(frame.storages[first + slot]) is None:
                lowering.drop(variables.define(frame.keys[first + slot], frame.storages[first + slot]))
    for slot in range(first, end):
        if frame.storage_ends[slot]:
            lowering.drop(variables.all_on(frame.storages[slot]))


class OpLine:
    """The line of one op while it is being built."""

    def __init__(self, lowering: Lowering, template: Template, row: int, ordinal: int) -> None:
        self.lowering, self.template, self.row, self.ordinal = lowering, template, row, ordinal
        self.first = lowering.frame.tensor_first[row]
        self.end = lowering.frame.tensor_first[row + 1]
        self.temporary: list[str] = []  # registers that are deleted at the end of the line
        self.after: list[str] = []  # statements after the call, in the same line
        self.mutated: list[int] = []  # arguments that become other tensors and are not needed unchanged
        self.defined: set[int] = set()  # results that become variables
        self.assigned: set[str] = set()  # names that the line assigns

    def write(self) -> None:
        lowering, template = self.lowering, self.template
        self._check_tensors()
        call, slot_names = self._call()
        leaving = self._settle()
        for name in leaving:
            lowering.text.free(name)
        for name in self.temporary:
            lowering.text.free(name)
        leaving += self.temporary
        self.temporary = []
        if lowering.checks_shapes(template) and not template.raises:
            arguments = "".join(f", {name}" for name in slot_names)
            call = f"{lowering.text.constant(self._expectation())}({call}{arguments})"
        statement = self._assign(call)
        gone = [name for name in dict.fromkeys(leaving) if name not in self.assigned] + self.temporary
        for name in self.temporary:
            lowering.text.free(name)
        parts = [statement, *self.after]
        if gone:
            parts.append(f"del {', '.join(gone)}")
        lowering.text.line(self.ordinal, "; ".join(parts))

    def write_return(self) -> None:
        """Write the call and return its result from the window, which ends here."""
        lowering = self.lowering
        self._check_tensors()
        call, _slot_names = self._call(expect_failure=False)
        lowering.text.line(self.ordinal, f"return {call}")
        lowering.text.returns_result = True

    def _check_tensors(self) -> None:
        """Raise ReplayRefused if the kernel cannot be called with these tensors."""
        lowering, template = self.lowering, self.template
        if not template.kernel.how:
            return  # an operator checks them itself
        slots = range(self.first, self.first + template.layout.arg_tensors)
        metas = [lowering.reader.metas[lowering.frame.metas[slot]] for slot in slots]
        problem = template.kernel.problem_with([None if each is None else TORCH_DTYPE[each.dtype] for each in metas])
        if problem:
            name = template.kernel.schema.name
            raise ReplayRefused(f"{lowering.reader.path}: ordinal {self.ordinal}: {name} cannot be called", (problem,))

    def _call(self, *, expect_failure: bool = True) -> tuple[str, list[str]]:
        """The text of the call, and the name under which each tensor argument is passed."""
        lowering, frame, names, text = self.lowering, self.lowering.frame, self.lowering.names, self.lowering.text
        template, first, ordinal = self.template, self.first, self.ordinal
        protected = self._protect() if template.effects.rebinds or template.effects.reshapes else {}
        holes: list[str] = []
        values: list[Any] = []
        slot_names: list[str] = []
        for operand, what in template.operands:
            if operand is Operand.tensor and what == 0 and operator_named(template.kernel.schema.name).attaches_memory:
                # What it stood for does not matter, and may be gone.
                base = lowering.storage(frame.storages[first], ordinal)
                name = f"{text.constant(partial(unattached, lowering.view(first).dtype))}({base})"
                slot_names.append(name)
                values.append(None)
            elif operand is Operand.tensor:
                name = (
                    protected.get(what)
                    or names.get(frame.keys[first + what])
                    or lowering.acquire(first + what, ordinal)
                )
                if lowering.unbounded:
                    name = f"{text.shared('inside', require_inside)}({name})"
                slot_names.append(name)
                values.append(None)
            elif operand is Operand.own:
                value = what(frame.ints, frame.int_first[self.row], frame.floats, frame.float_first[self.row])
                name = text.constant(value)
                values.append(value)
            elif operand is Operand.shared:
                name = text.shared(*what)
                values.append(what[1])
            else:
                storage = frame.ints[frame.int_first[self.row] + what]
                name = f"{text.shared('storage of', storage_of)}({lowering.storage(storage, ordinal)})"
                values.append(None)
            holes.append(name)
        function = self._function(expect_failure, values)
        text.kernel = int(function[1:])  # parameters are called a0, a1…
        return template.text % (function, *holes), slot_names

    def _function(self, expect_failure: bool, values: list[Any]) -> str:
        """The parameter that holds the function to call; `values` are the non-tensor operands."""
        lowering, kernel = self.lowering, self.template.kernel
        call: Any = lowering.context.direct.function(self.template, values)
        key: tuple[Hashable, ...] = ("kernel", call, self.template.raises)
        if kernel.computes_for_gradients >= 0 and self._computed(kernel.computes_for_gradients):
            call = partial(requiring_gradients, call)
            key = (*key, "for gradients")
        if kernel.draws and lowering.context.draws_on is not None:
            call = DrawOnHost(call, kernel.schema, lowering.context.draws_on)
        if kernel.makes_unchecked_views:
            nested = operator_named(kernel.schema.name).unchecked_nested
            call = partial(checked_nested if nested else checked_view, call)
        if kernel.casts_inside:
            autocast = self._autocast()
            call = self._custom(call, autocast)
            key = (*key, *sorted(autocast.items()), self.template.addresses)
        if lowering.context.stand_in is not None and not self.template.raises:
            instead = lowering.context.stand_in.call(self._site(call))
            if instead is not None:
                return lowering.text.constant(instead[1]) if instead[0] is None else lowering.text.shared(*instead)
        if self.template.raises and expect_failure:
            call = MustRaise(call, kernel.schema)
            lowering.unbounded = True  # it may have made an argument longer than its memory before raising
        return lowering.text.shared(key, call)

    def _computed(self, result: int) -> bool:
        """Whether the capture uses any elements of a result."""
        slots = self.template.layout.results[result].tensors if self.template.layout.results else ()
        metas = [self.lowering.reader.metas[self.lowering.frame.metas[self.first + slot]] for slot in slots]
        return any(meta is not None and 0 not in meta.sizes for meta in metas)

    def _autocast(self) -> dict[str, Any]:
        """The autocast state in which the op was captured."""
        return {name: value for name, value in self.lowering.settings.items() if name.startswith("autocast.") and value}

    def _custom(self, function: Callable[..., Any], autocast: dict[str, Any]) -> Callable[..., Any]:
        call: Callable[..., Any] = partial(call_custom, function, autocast)
        if self.template.addresses is not None:
            call = PassAddresses(call, self.template.kernel.schema, self.template.addresses)
        return call

    def _site(self, call: Callable[..., Any]) -> CallSite:
        """This call as a site at which its kernel can be replaced."""
        lowering, frame, template = self.lowering, self.lowering.frame, self.template
        arguments = self.first + template.layout.arg_tensors
        taken, given = frame.storages[self.first : arguments], frame.storages[arguments : self.end]
        autocast = self._autocast()
        return CallSite(
            self.ordinal,
            template.signature_id,
            tuple(frame.metas[self.first : arguments]),
            template.kernel_id,
            template.kernel,
            template.layout,
            template.effects,
            call,
            (lambda function: function) if template.kernel.own else lambda function: self._custom(function, autocast),
            not leaves_unwritten(lowering.reader, taken, given),
            template.addresses is not None and template.addresses.once,
        )

    def _protect(self) -> dict[int, str]:
        """Make fresh aliases of arguments whose metadata the op changes in place but which are still needed
        unchanged."""
        lowering, frame, first = self.lowering, self.lowering.frame, self.first
        protected: dict[int, str] = {}
        effects = self.template.effects
        for slot, result in [*effects.rebinds, *((slot, None) for slot in effects.reshapes)]:
            here = first + slot
            if slot == 0 and operator_named(self.template.kernel.schema.name).attaches_memory:
                continue
            key, storage = frame.keys[here], frame.storages[here]
            if result is not None and frame.keys[first + result] == key:
                continue
            name = lowering.names.get(key) or lowering.acquire(here, self.ordinal)
            base_needed = (
                not frame.storage_ends[here]
                and lowering.variables.alone(key)
                and (result is None or frame.storages[first + result] != storage)
            )
            if frame.ends[here] and not base_needed:
                self.mutated.append(key)
                continue
            alias = lowering.text.register()
            lowering.text.line(self.ordinal, f"{alias} = {lowering.text.constant(lowering.view(here))}({name})")
            self.temporary.append(alias)
            protected[slot] = alias
        return protected

    def _settle(self) -> list[str]:
        """Define the results' variables and release those that end here; returns the names to delete."""
        lowering, frame, variables = self.lowering, self.lowering.frame, self.lowering.variables
        names = lowering.drop(self.mutated)
        for result in self.template.leaves:
            for part in result.parts or (result,):
                if part.leaf is Leaf.tensor:
                    slot = self.first + part.what
                    key = frame.keys[slot]
                    if key not in variables:
                        names += lowering.drop(variables.define(key, frame.storages[slot]))
                        self.defined.add(key)
        if True not in frame.ends[self.first : self.end] and True not in frame.storage_ends[self.first : self.end]:
            return names + self._expired_storages()
        for slot in range(self.first, self.end):
            key = frame.keys[slot]
            if frame.ends[slot] and key in variables and not frame.storage_ends[slot]:
                if variables.alone(key):
                    variables.keep_idle(key)
                else:
                    names += lowering.drop([key]) if key not in self.defined else self._undefine([key])
        for slot in range(self.first, self.end):
            if frame.storage_ends[slot]:
                names += self._expire(frame.storages[slot])
        return names + self._expired_storages()

    def _expired_storages(self) -> list[str]:
        """Storages that are arguments themselves and are last used here."""
        lowering, frame = self.lowering, self.lowering.frame
        names: list[str] = []
        for operand, what in self.template.operands:
            if operand is Operand.storage:
                storage = frame.ints[frame.int_first[self.row] + what]
                if lowering.scan.last_use_of(storage) == self.ordinal:
                    names += self._expire(storage)
        return names

    def _expire(self, storage: int) -> list[str]:
        keys = self.lowering.variables.all_on(storage)
        self._undefine([key for key in keys if key in self.defined])
        return self.lowering.drop([key for key in keys if key in self.lowering.variables])

    def _undefine(self, keys: list[int]) -> list[str]:
        """Drop results that are never used: they get no name."""
        self.lowering.variables.forget(keys)
        self.defined.difference_update(keys)
        return []

    def _assign(self, call: str) -> str:
        leaves = self.template.leaves
        if all(self._ignored(leaf) for leaf in leaves):
            return call
        if self.template.target == "%s" and leaves[0].leaf is Leaf.scalar:
            return f"{self.lowering.text.constant(self._scalar(leaves[0]))}({call})"
        names = [self._leaf_name(leaf) for leaf in leaves]
        self.assigned.update(names)
        return f"{self.template.target % tuple(names)} = {call}"

    def _ignored(self, leaf: Result) -> bool:
        if leaf.leaf is Leaf.tensor:
            return self.lowering.frame.keys[self.first + leaf.what] not in self.defined
        return leaf.leaf is Leaf.nothing

    def _leaf_name(self, leaf: Result, *, of_composite: bool = False) -> str:
        """The name that a leaf is assigned to; further work on it is appended to `after`."""
        lowering = self.lowering
        if leaf.leaf is Leaf.tensor:
            key = lowering.frame.keys[self.first + leaf.what]
            if key in self.defined and key not in lowering.names:
                name = lowering.names[key] = lowering.text.register()
                return name
        name = lowering.text.register()
        self.temporary.append(name)
        if leaf.leaf is Leaf.scalar:
            self.after.append(f"{lowering.text.constant(self._scalar(leaf, read=not of_composite))}({name})")
        elif leaf.leaf is Leaf.composite:
            count = len(leaf.parts)
            take_apart = lowering.text.shared(
                ("take apart", leaf.what, count), partial(unpack_composite, leaf.what, count)
            )
            checks, self.after = self.after, []
            parts = [self._leaf_name(part, of_composite=True) for part in leaf.parts]
            self.assigned.update(parts)
            taken = f"({''.join(part + ', ' for part in parts)}) = {take_apart}({name})"
            self.after = [*checks, taken, *self.after]
        return name

    def _scalar(self, leaf: Result, *, read: bool = True) -> Callable[[Any], None]:
        frame = self.lowering.frame
        expected = leaf.what(frame.ints, frame.int_first[self.row], frame.floats, frame.float_first[self.row])
        lowering, where = self.lowering, CompareLocation(self.ordinal, leaf.index, self.ordinal)
        return partial(lowering.context.judge.scalar, where, expected, read=read, unsteady=lowering.op_is_unsteady)

    def _expectation(self) -> ExpectResults:
        lowering, frame, first = self.lowering, self.lowering.frame, self.first
        layout = self.template.layout
        passed = [what for operand, what in self.template.operands if operand is Operand.tensor]
        changed = {slot for slot, _result in self.template.effects.rebinds} | set(self.template.effects.reshapes)
        storages = [None if arg in changed else frame.storages[first + arg] for arg in passed]
        given: dict[int, int] = {}
        for position, arg in enumerate(passed):
            if arg or not operator_named(self.template.kernel.schema.name).attaches_memory:  # else it is a stand-in
                given.setdefault(frame.storages[first + arg], position)
        given |= {storage: position for position, storage in reversed(list(enumerate(storages))) if storage is not None}
        expected: dict[int, ExpectedTensor] = {}
        for place in layout.results:
            for slot in place.tensors:
                storage = frame.storages[first + slot]
                meta = lowering.reader.metas[frame.metas[first + slot]]
                device = lowering.context.devices.target(meta.device)
                expected[slot] = ExpectedTensor(lowering.view(first + slot), device, storage, given.get(storage))
        return ExpectResults(
            lowering.context.judge,
            CompareLocation(self.ordinal, None, self.ordinal),
            layout.results,
            expected,
            storages,
            sizes_only=not lowering.compare,
        )


class Watcher(Protocol):
    """Is called for the ops at the ordinals it watches. Settings and generators are those of the replay."""

    def watches(self, ordinal: int) -> bool: ...

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        """The op runs next. `storages` are those it takes, by their id in the capture."""

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        """The op returned. Both by tensor slot of the record; components stand for composites. Not called for an op
        that raised under capture."""


def lower_watched(watcher: Watcher) -> Callable[[Lowering, int, int], None]:
    """How to lower ops so that the watcher is called."""

    def lower(lowering: Lowering, row: int, ordinal: int) -> None:
        template = lowering.template(lowering.frame.signatures[row]) if watcher.watches(ordinal) else None
        if template is None:
            lower_op(lowering, row, ordinal)
        else:
            _WatchedLine(watcher, lowering, template, row, ordinal).write()

    return lower


class _WatchedLine(OpLine):
    def __init__(self, watcher: Watcher, *line: Any) -> None:
        super().__init__(*line)
        self._watcher = watcher

    def _call(self, *, expect_failure: bool = True) -> tuple[str, list[str]]:
        call, slot_names = super()._call(expect_failure=expect_failure)
        lowering, frame, text = self.lowering, self.lowering.frame, self.lowering.text
        slots = [what for operand, what in self.template.operands if operand is Operand.tensor]
        storages = [frame.storages[self.first + slot] for slot in slots]
        names = list(slot_names)
        for operand, what in self.template.operands:
            if operand is Operand.storage:
                storages.append(frame.ints[frame.int_first[self.row] + what])
                names.append(lowering.storage(storages[-1], self.ordinal))
        before = text.constant(partial(_before, self._watcher, self.ordinal, storages))
        text.line(self.ordinal, f"{before}({', '.join(names)})")
        if self.template.raises:
            return call, slot_names
        after = text.constant(partial(_after, self._watcher, self.ordinal, self.template.layout.results, slots))
        return f"{after}({call}{''.join(f', {name}' for name in slot_names)})", slot_names


def _before(watcher: Watcher, ordinal: int, storages: Sequence[int], *values: Any) -> None:
    watcher.before(
        ordinal, {number: storage_of(value) for number, value in zip(storages, values, strict=True) if number}
    )


def _after(
    watcher: Watcher,
    ordinal: int,
    places: Sequence[NodePlace],
    slots: Sequence[int],
    returned: Any,
    *args: torch.Tensor,
) -> Any:
    found: dict[int, torch.Tensor] = {}
    values = (returned,) if len(places) == 1 else returned if places else ()
    # If the structure of a result differs, the comparison that follows finds that.
    if isinstance(values, tuple | list) and len(values) == len(places):
        for place, value in zip(places, values, strict=True):
            _gather(place, value, found)
    watcher.after(ordinal, found, dict(zip(slots, args, strict=True)))
    return returned


def _gather(place: NodePlace, value: Any, found: dict[int, torch.Tensor]) -> None:
    if not place.tensors:
        return
    if not place.children:
        if isinstance(value, torch.Tensor):
            found[place.tensor_slot] = value
        return
    parts = take_apart(value)[1] if isinstance(value, torch.Tensor | torch.ScriptObject) else value
    if isinstance(parts, tuple | list) and len(parts) == len(place.children):
        for child, part in zip(place.children, parts, strict=True):
            _gather(child, part, found)
