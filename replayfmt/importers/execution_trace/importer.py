"""Imports a PyTorch execution trace (ExecutionTraceObserver): a graph in which results of one call are arguments of
others.

The nodes are read, those that represent the work are chosen, the length of each allocation is determined; then the
calls are written in their order, with the storages and views of the trace. A storage is imported where something first
reads it, unless a call returned it; its content is what the trace has, usually none. A node that cannot be an op is an
unsupported record that names it: collectives with their sizes and groups, Triton kernels with their source file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, Layout, StorageOrigin, TensorFlag
from replayfmt.format.model import TensorMeta
from replayfmt.format.writer import Moment
from replayfmt.pytorch.collectives import Unknown

from ..common.arguments import RETURNED_STORAGE, DeviceName, TensorSpec, dtype_of, wrapped
from ..common.collectives import NO_WAIT, Bytes, InFlight, TracedCollectives, bytes_of, traced_groups
from ..common.inductor_cache import NoKernel
from ..common.json_stream import JsonStream
from ..common.operators import Operators
from ..common.options import ImportOptions
from ..common.report import ImportReport, ReportEntry, most
from ..common.synthesis import ImportedSession, OpForm, Tensor, TracedStorage, imported_session, of_ranks
from ..common.trace_files import Progress, RankTrace, others_note, rank_fields
from ..rewrites.portable import Portable
from ..rewrites.rewriting import Rewritten
from .allocations import PlacedTensor, TracedContent, like_number
from .calls import NodeCalls, NodeStep
from .nodes import (
    GROUPS,
    NodeValues,
    TracedTensor,
    TraceNode,
    as_traced,
    communication,
    groups_listed,
    node_of,
    rank_said,
    schema_version,
    world_said,
)
from .selection import NEVER_CHOSEN, ChosenNodes, NodeKind, NodeTable
from .selection import MarkPath as MarkPath

_KEPT_TENSORS = 10_000
_USED = f"{NO_WAIT} before the first call that uses its memory"
_COMPILED = "compiled code: the operators that it calls are in the trace, what it does itself is not"
_NO_OPERATOR = "it has no operator; whatever it launched left no trace"


class GraphWriter:
    """Writes one step after the other."""

    def __init__(
        self,
        capture: ImportedSession,
        report: ImportReport,
        calls: NodeCalls,
        content: TracedContent,
        portable: Portable | None,
        groups: Mapping[str, Mapping[str, Any]],
        collectives: TracedCollectives | None,
    ) -> None:
        self._capture, self._report, self._calls, self._content = capture, report, calls, content
        self._portable, self._groups, self._collectives = portable, groups, collectives
        self._storages: dict[int, TracedStorage] = {}
        self._tensors: OrderedDict[Any, Tensor] = OrderedDict()
        self._communication: dict[int, TraceNode] = {}
        self._told: list[str] = []
        self._around: dict[str, Any] = {}
        self._forms: dict[Any, tuple[OpForm, list[int]]] = {}
        self._shown: dict[int, str] = {}

    def inside(self, node: TraceNode) -> None:
        """A node within a chosen one: the description of a collective comes before the operator that made it."""
        if node.name == "record_param_comms" and communication(node):
            self._communication.setdefault(node.thread, node)  # the innermost: it ends first

    def write(self, step: NodeStep, scope: int, within: tuple[str, ...] = ()) -> None:
        """Write the next chosen node, inside a scope; `within` names the wrappers around it."""
        self._around = {"within": list(within)} if within else {}
        moment = Moment(thread=step.node.thread, scope=scope)
        landed = self._land(step, moment) if self._collectives is not None else []
        if step.kind is NodeKind.operator:
            self._operator(step, moment)
        elif step.kind is NodeKind.collective:
            self._collective(step, moment)
        elif step.kind is NodeKind.triton:
            self._triton(step, moment)
        elif step.kind is NodeKind.compiled:
            self._unsupported(step, moment, "compiled_region", _COMPILED)
        else:
            self._unsupported(step, moment, "unknown_work", _NO_OPERATOR)
        self._communication.pop(step.node.thread, None)
        self._release((*step.given.values(), *step.returned.values(), *landed), step.number, moment)

    def _release(self, tensors: Iterable[PlacedTensor], number: int, moment: Moment) -> None:
        """Release what no step after this one uses, and no collective in flight."""
        over = []
        for placed in tensors:
            storage = self._storages.get(placed.allocation)
            if storage is None or self._calls.memory.allocations.last[placed.allocation] > number:
                continue
            if self._collectives is None or not self._collectives.holds(storage):
                over.append(self._storages.pop(placed.allocation))
        self._capture.release(over, moment)

    def _land(self, step: NodeStep, moment: Moment) -> list[PlacedTensor]:
        """Wait for the collectives whose memory this step is about to use; their tensors."""
        assert self._collectives is not None
        reads, writes = ([each for tensor in uses for each in self._bytes(step, tensor)] for uses in step.uses)
        if step.node.name.endswith("::wait_tensor"):
            reads = [each for tensor in step.given for each in self._bytes(step, tensor)]
        elif step.kind is NodeKind.collective and step.node.schema:
            reads, writes = [], []  # which it writes is known when it is recorded
        seen = step.node.name.endswith("::wait_tensor")
        landed = self._wait(self._collectives.used(reads, writes), moment, "" if seen else _USED)
        return landed + self._wait(self._collectives.crowded(), moment)

    def _wait(self, flights: Iterable[InFlight], moment: Moment, assumed: str = _USED) -> list[PlacedTensor]:
        assert self._collectives is not None
        landed: list[PlacedTensor] = []
        for flight in flights:
            self._collectives.wait(flight, moment, assumed)
            landed += flight.kept
        return landed

    def _bytes(self, step: NodeStep, tensor: TracedTensor) -> Iterator[Bytes]:
        placed = step.given.get(tensor)
        storage = self._storages.get(placed.allocation) if placed is not None else None
        if placed is not None and storage is not None:
            yield bytes_of(storage, tensor.item_bytes, tensor.sizes, placed.strides, tensor.offset)

    def _launch(self, step: NodeStep, moment: Moment, facts: _Communication) -> None:
        """Record a collective as a launch. Raises Unknown and ValueError if it cannot be."""
        node, schema = step.node, self._calls.traced_schema(step.node.schema)
        assert self._collectives is not None
        if schema is None:
            raise Unknown("the trace does not have its operator")
        given: dict[str, Any] = {argument.name: [] for argument in schema.arguments}
        for argument, value in zip(schema.arguments, node.inputs.values, strict=False):
            given[argument.name] = value
        names = [argument.name for argument in schema.arguments]
        tensors: dict[str, list[Tensor]] = {}
        for position, tensor in node.inputs.tensors:
            tensors.setdefault(names[position], []).append(self._placed(step.given[tensor]))
        if "sparse_indices" in tensors:
            raise Unknown("it reduces sparse tensors")
        named = str(given.get("group_name", facts.row.get("group", "")))
        said, assumed = self._collectives.parts(node.name, given | tensors, named)
        self._enter(step, {})
        if not node.name.startswith("c10d::"):
            said[1].outputs.extend(map(self._placed, step.returned.values()))
        landed = self._wait(self._collectives.meeting(said[1]), moment)
        note = {"import": "inferred", **self._around, "assumed": assumed} if assumed else {"import": "exact"}
        kept = [*step.given.values(), *step.returned.values()]
        ordinal = self._collectives.launch(node.name, said, moment, note, [*kept, *landed])
        self._count(step, ordinal, assumed, "", "the dispatcher")
        if node.name == "c10d::barrier":
            self._wait(self._collectives.in_flight()[-1:], moment, "")

    def finish(self) -> None:
        """Wait for what the trace shows no use of."""
        if self._collectives is not None:
            self._release(self._wait(self._collectives.in_flight(), Moment()), 1 << 62, Moment())

    def _operator(self, step: NodeStep, moment: Moment) -> None:
        self._calls.bind(step)
        assert step.bound is not None
        choice, binding = step.bound.choice, step.bound.binding
        if choice.operator is None:
            self._unsupported(step, moment, choice.reason, choice.detail)
            return
        assert binding is not None
        if binding.missing:
            self._unsupported(step, moment, "import_incomplete", "; ".join(binding.missing))
            return
        self._told = []
        assumed = [*choice.assumed, *binding.assumed, *step.assumed]
        try:
            ordinal = self._record(step, moment, assumed)
        except ValueError as error:
            self._unsupported(step, moment, "import_incomplete", str(error))
            return
        self._count(step, ordinal, assumed, choice.operator.overload, choice.operator.found)

    def _record(self, step: NodeStep, moment: Moment, assumed: list[str]) -> int:
        """Write an operator's call; what is assumed besides is added. Calls of one form differ in their memory alone.
        Raises ValueError for what a record cannot hold."""
        assert step.bound is not None and step.bound.binding is not None and step.bound.choice.operator is not None
        places: dict[int, int] = {}
        for placed in step.given.values():
            places.setdefault(placed.allocation, len(places))
        memory = tuple(
            [
                (places.setdefault(each.allocation, len(places)), each.strides, each.flags)
                for each in step.returned.values()
            ]
        )
        allocations = list(places)
        key = id(step.bound), self._calls.form(step.node.outputs), memory
        known = self._forms.get(key)
        if known is not None:
            form, used = known
            storages = [self._storage(allocations[place]) for place in used]
            self._enter(step, places)
            assumed += self._told
            note: dict[str, Any] = {"import": "inferred" if assumed else "exact", **self._around}
            return self._capture.repeat(form, storages, moment, note | ({"assumed": assumed} if assumed else {}))
        arguments = [(name, self._value(step, value, allocations)) for name, value in step.bound.binding.arguments]
        outputs = step.node.outputs
        results = [self._result(step, value, _at(outputs.types, place)) for place, value in enumerate(outputs.values)]
        self._enter(step, places)
        given = [value for _name, value in arguments if isinstance(value, TracedStorage)]
        for each in given:
            self._capture.enter(each, moment)
        assumed += self._told
        note = {"import": "inferred" if assumed else "exact", **self._around}
        kernel = step.bound.choice.operator.kernel
        rewritten = self._portable.rewrite(kernel, arguments, results) if self._portable is not None else None
        if isinstance(rewritten, Rewritten):
            ordinal = self._rewritten(rewritten, moment, assumed)
            assumed.append(rewritten.note)
            return ordinal
        if assumed:
            note["assumed"] = assumed
        if isinstance(rewritten, str):
            note["not_rewritten"] = rewritten
            self._report.note(f"{kernel.qualified_name} stays as it is: {rewritten}")
        form, storages = self._capture.form(kernel, arguments, results)
        if rewritten is None and not given:
            of = {self._storages[each]: place for place, each in enumerate(allocations) if each in self._storages}
            self._forms[key] = form, [of[each] for each in storages]
        return self._capture.repeat(form, storages, moment, note)

    def _rewritten(self, rewritten: Rewritten, moment: Moment, assumed: list[str]) -> int:
        note = {
            "import": "inferred",
            **self._around,
            "assumed": assumed + [rewritten.note],
            "rewritten": rewritten.what,
        }
        ordinals = [
            self._capture.op(kernel, arguments, results, moment, note) for kernel, arguments, results in rewritten.calls
        ]
        if rewritten.sentence not in self._report.notes:
            self._report.notes.append(rewritten.sentence)
        return ordinals[0] if ordinals else self._capture.records

    def _count(self, step: NodeStep, ordinal: int, assumed: list[str], overload: str, found: str) -> None:
        shown, told = self._signature(step.node), tuple(assumed)
        self._report.add(
            (step.node.schema, shown, told),
            lambda: ReportEntry(step.node.name, overload, "inferred" if told else "exact", shown, found, told),
            ordinal,
        )

    def _signature(self, node: TraceNode) -> str:
        form = self._calls.form(node.inputs)
        shown = self._shown.get(form)
        if shown is None:
            shown = self._shown[form] = _signature(node)
        return shown

    def _value(self, step: NodeStep, value: Any, allocations: Sequence[int]) -> Any:
        """A bound argument in the form that a record holds."""
        if isinstance(value, TensorSpec):
            if value.dtype is None or value.sizes is None or value.strides is None or type(value.identity) is not int:
                raise ValueError(f"a tensor of sizes {value.sizes} whose dtype or strides are not recorded")
            where = allocations[value.identity]
            return self._view(where, value.dtype, value.sizes, value.strides, value.offset, value.flags)
        if isinstance(value, list):
            return [self._value(step, each, allocations) for each in value]
        if isinstance(value, DeviceName) and value.name is None:
            raise ValueError("a device argument whose device is not recorded")
        if value is RETURNED_STORAGE:
            # Operators that take a storage return a tensor on it.
            placed = next(iter(step.returned.values()), None)
            if placed is None:
                raise ValueError("a storage argument of an operator that returns no tensor")
            return self._storage(placed.allocation)
        return value

    def _view(
        self,
        allocation: Any,
        dtype: DType,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        flags: TensorFlag,
    ) -> Tensor:
        key = (allocation, dtype, sizes, strides, offset, flags)
        tensor = self._tensors.get(key)
        if tensor is None:
            device = self._capture.device(self._calls.allocations.devices[allocation])
            meta = TensorMeta(dtype, Layout.strided, device, sizes, strides, flags)
            tensor = self._tensors[key] = Tensor(self._storage(allocation), meta, offset)
            if len(self._tensors) > _KEPT_TENSORS:
                self._tensors.popitem(last=False)
        else:
            self._tensors.move_to_end(key)
        return tensor

    def _storage(self, allocation: int) -> TracedStorage:
        storage = self._storages.get(allocation)
        if storage is None:
            known = self._calls.allocations
            device = self._capture.device(known.devices[allocation])
            storage = self._storages[allocation] = TracedStorage(known.bytes[allocation], device)
        return storage

    def _result(self, step: NodeStep, value: Any, kind: str) -> Any:
        """A returned tensor or list of tensors; values of other kinds depend on content, which this trace lacks."""
        if type(value) is TracedTensor:
            placed = step.returned.get(value)
            return None if placed is None else self._placed(placed)
        head, inner = wrapped(kind)
        if head == "GenericList" and isinstance(value, list) and any(name.startswith("Tensor") for name in inner):
            return [self._result(step, each, _at(inner, index)) for index, each in enumerate(value)]
        return None

    def _enter(self, step: NodeStep, places: Mapping[int, int]) -> None:
        """Give storages that nothing returned the content that the trace has for them. `places` are those of the
        allocations of the step, by which bound arguments name them."""
        known = map(self._storages.get, [each.allocation for each in step.given.values()])
        if all([storage is None or storage.id for storage in known]):  # nearly always
            return
        for number, (_position, tensor) in enumerate(step.node.inputs.tensors):
            placed = step.given[tensor]
            storage = self._storages.get(placed.allocation)
            if storage is None or storage.id or storage.origin is not StorageOrigin.absent:
                continue
            dtype = dtype_of(tensor.type_name)
            if dtype is None:
                continue
            if self._calls.allocations.made[placed.allocation]:
                storage.reason = "what returned it was not imported"
                continue
            span = step.node.integer_ranges().get(number)
            found = self._content.find(step.node.id, number, placed, dtype, storage, span)
            certain = found is not None and found.origin is StorageOrigin.payload
            unseen = placed.allocation in self._calls.memory.unseen
            if found is None and unseen:
                self._told.append(
                    f"the content of tensor {number} of the arguments was written unseen; synthesized at replay"
                )
            elif found is None and like_number(tensor):
                assert step.bound is not None and step.bound.binding is not None
                bound = {
                    value.identity: value.dtype
                    for _name, value in step.bound.binding.arguments
                    if isinstance(value, TensorSpec) and value.dtype is not None
                }
                dtype = bound.get(places[placed.allocation], dtype)
                found = self._content.number(step.node.name, dtype, storage)
            if found is not None:
                storage.origin, storage.content = found.origin, found.content
                if not certain:
                    self._told.append(f"tensor {number} of the arguments: {found.told}")

    def _unsupported(
        self, step: NodeStep, moment: Moment, reason: str, detail: str, more: Mapping[str, Any] | None = None
    ) -> None:
        node = step.node
        ordinal = self._capture.unsupported(
            reason, node.name, detail, moment, {"import": "incomplete", **self._around, **(more or {})}
        )
        shown = self._signature(node)
        self._report.add(
            (node.schema or node.name, shown, reason, detail),
            lambda: ReportEntry(node.name, "", "incomplete", shown, reason=reason, detail=detail),
            ordinal,
        )

    def _collective(self, step: NodeStep, moment: Moment) -> None:
        node = step.node
        described = node if node.name == "record_param_comms" else self._communication.get(node.thread)
        facts = _Communication(described, self._groups, self._signature(node))
        tensors = [self._placed(each) for each in step.returned.values() or step.given.values()]
        if self._portable is not None and facts.alone and tensors:
            rewritten = self._portable.alone(node.name, facts.text, tensors)
            assumed: list[str] = []
            ordinal = self._rewritten(rewritten, moment, assumed)
            self._count(step, ordinal, [rewritten.note], "", "the dispatcher")
            return
        detail = facts.text
        if self._collectives is not None:
            if node.name.endswith("::wait_tensor"):
                self._count(step, self._capture.records - 1, [], "", "the dispatcher")
                return
            try:
                self._launch(step, moment, facts)
                return
            except (Unknown, ValueError) as problem:
                detail += f"; not replayable: {problem}"
        self._unsupported(step, moment, "collective", detail, {"collective": facts.row} if facts.row else None)

    def _placed(self, placed: PlacedTensor) -> Tensor:
        dtype = dtype_of(placed.tensor.type_name)
        if dtype is None:
            raise ValueError(f"a tensor of the unknown type {placed.tensor.type_name!r}")
        return self._view(
            placed.allocation, dtype, placed.tensor.sizes, placed.strides, placed.tensor.offset, placed.flags
        )

    def _triton(self, step: NodeStep, moment: Moment) -> None:
        node = step.node
        try:
            source = self._content.source(node.kernel_file) if node.kernel_file else None
            where = "" if source is None else f", source {node.kernel_file}"
        except NoKernel as problem:
            source, where = None, f", source {node.kernel_file} not found: {problem}"
        grids = [value for value, kind in zip(node.inputs.values, node.inputs.types, strict=False) if kind == "String"]
        row: dict[str, Any] = {
            "kernel": node.name,
            "file": node.kernel_file or None,
            "grid": next(iter(grids), None),
            "source": source,
        }
        self._unsupported(step, moment, "triton_launch", f"the Triton kernel {node.name}{where}", {"triton": row})


class _Communication:
    """What `record_param_comms` says about a collective. `alone`: its group has one rank."""

    def __init__(self, node: TraceNode | None, groups: Mapping[str, Mapping[str, Any]], arguments: str) -> None:
        facts = communication(node) if node is not None else {}
        name = str(facts.get("pg_name", ""))
        group = groups.get(name, {})
        size = facts.get("pg_size", group.get("group_size"))
        self.alone = size == 1
        self.row: dict[str, Any] = {}
        if not facts:
            self.text = f"arguments: {arguments}; the trace does not name its group"
            return
        self.row = {
            "name": facts["collective_name"],
            "dtype": facts.get("dtype"),
            "elements_in": facts.get("in_msg_nelems"),
            "elements_out": facts.get("out_msg_nelems"),
            "group": name,
            "group_description": facts.get("pg_desc"),
            "ranks": group.get("ranks") or None,
            "group_size": size,
        }
        described = f" ({facts['pg_desc']})" if facts.get("pg_desc") else ""
        ranks = "a group of unknown size" if size is None else f"{size} rank{'s' if size != 1 else ''}"
        self.text = (
            f"{facts['collective_name']} of {facts.get('in_msg_nelems', '?')} {facts.get('dtype', '?')} "
            f"elements over {ranks}, group {name!r}{described}"
        )


def _at(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else ""


def _signature(node: TraceNode) -> str:
    """A node's arguments for people: `float[512,1024], [1, 1], 0.1`."""
    by_position: dict[int, list[TracedTensor]] = {}
    for position, tensor in node.inputs.tensors:
        by_position.setdefault(position, []).append(tensor)
    return ", ".join(
        _argument(node.inputs, position, by_position.get(position)) for position in range(len(node.inputs.values))
    )


def _argument(inputs: NodeValues, position: int, tensors: list[TracedTensor] | None) -> str:
    if tensors is None:
        return str(as_traced(inputs.values[position]))
    texts = [_shown_tensor(tensor.type_name, tensor.sizes) for tensor in tensors[:3]]
    if len(tensors) == 1 and inputs.types[position].startswith("Tensor"):
        return texts[0]
    return f"[{', '.join(texts)}{f' and {len(tensors) - 3} more' if len(tensors) > 3 else ''}]"


@lru_cache(maxsize=4096)
def _shown_tensor(type_name: str, sizes: tuple[int, ...]) -> str:
    return f"{type_name}{list(sizes)}".replace(" ", "")


KIND = "execution-trace"


def import_execution_trace(
    path: str | PathLike[str],
    out: str | PathLike[str],
    options: ImportOptions | None = None,
    *,
    force: bool = False,
    place: RankTrace | None = None,
) -> ImportReport:
    """Make a capture of an execution trace: plain, gzip, or in a tar archive with its resources.

    `place` says which file of an archive it is and which rank's, if that was chosen. The level `root` imports the
    outermost operators instead of the deepest ones that cover all of the work.

    Raises CaptureNotFound and InvalidCapture for the file, UnsupportedVersion for an unknown schema, OutputExists and
    CaptureFailed for the capture.
    """
    options = options or ImportOptions()
    trace = _Trace(fspath(path), options.progress, place.member if place else "")
    report = ImportReport(Path(trace.path).name, KIND)
    selection = trace.select(roots=options.level == "root")
    if options.level == "launching":
        report.notes.append(
            "level launching: an execution trace does not show what launched work; the deepest operators are taken"
        )
    operators = Operators(options.libraries, options.names)
    calls = NodeCalls(operators)
    nodes = trace.nodes(selection)
    steps = [calls.step(node, chosen) for node, _position, chosen in nodes]
    ranks = rank_fields(trace.rank, trace.world_size, place)
    policies = {"schema": trace.schema, "traced": trace.time, "rewrite": options.rewrite}
    session = imported_session(KIND, report.source, **ranks, policies=policies | of_ranks(options.together))
    content = TracedContent(trace.path, trace.member, options.inductor)
    with ImportedSession(out, session, force=force) as capture:
        portable = Portable() if options.rewrite == "portable" else None
        groups = traced_groups(list(trace.groups.values()), ranks["world_size"])
        collectives = (
            TracedCollectives(capture, ranks["rank"], ranks["world_size"], groups) if options.together else None
        )
        writer = GraphWriter(capture, report, calls, content, portable, trace.groups, collectives)
        marks = _Marks(capture)
        for (node, position, _chosen), step in zip(nodes, steps, strict=True):
            if step is None:
                writer.inside(node)
                continue
            scope = marks.enter(selection.path_of(position), node.thread)
            writer.write(step, scope, selection.wrappers_of(position))
        marks.enter((), 0)
        writer.finish()
    report.problems += trace.problems + selection.problems + content.problems
    _finish(report, trace, selection, place)
    return report


def _finish(report: ImportReport, trace: _Trace, selection: ChosenNodes, place: RankTrace | None) -> None:
    report.counts = selection.counts()
    if trace.member and place is None:
        report.notes.append(others_note(trace.path, trace.member))
    if selection.dropped:
        report.notes.append(f"no work, left out: {most(selection.dropped)}")
    if selection.in_collectives:
        report.notes.append(f"inside collectives, as parts of them: {most(selection.in_collectives)}")
    if trace.version < (1, 1, 1):
        report.notes.append(
            f"schema {trace.schema} has no strides: they are computed where operators allow it, else assumed contiguous"
        )
    report.notes.append("tensors that no call produced have no content in the trace")


class _Trace:
    """The file, read once: its nodes, and what it says of itself."""

    def __init__(self, path: str, progress: Progress | None, member: str) -> None:
        self.path, self.member = path, member
        self._progress = progress
        self.schema = ""
        self.time: str | None = None
        self.version = (0, 0, 0)
        self.problems: list[str] = []
        self._nodes: list[TraceNode | None] = []  # None: one that cannot become a call
        self.rank: int | None = None
        self.world_size = 1
        self.groups: dict[str, dict[str, Any]] = {}

    def _rows(self) -> Iterator[tuple[str, Any]]:
        with JsonStream.open(self.path, self._progress, member=self.member) as stream:
            self.member = stream.member
            yield from stream.entries({"nodes"})
            self.problems = [*(str(problem) for problem in stream.problems), *self.problems]

    def select(self, *, roots: bool) -> ChosenNodes:
        """Read it. Raises InvalidCapture if the file is not an execution trace."""
        skeleton = NodeTable(self.path)
        known: dict[str, NodeValues] = {}
        entry = -1
        for key, value in self._rows():
            if key == "nodes":
                entry += 1
                if not self.schema:
                    raise InvalidCapture(f"{self.path}: not an execution trace: its nodes come before a schema version")
                try:
                    node = node_of(value, known)
                except ValueError as error:
                    self.problems.append(f"entry {entry} of the nodes was passed over: {error}")
                    continue
                kept = skeleton.add(node) not in NEVER_CHOSEN or node.name.startswith(_KEPT)
                self._nodes.append(node if kept else None)
                if self.rank is None:
                    self.rank = rank_said(node)
                if node.name == GROUPS:
                    listed = groups_listed(node)
                    self.groups |= {str(group.get("pg_name")): group for group in listed}
                    self.world_size = max(self.world_size, world_said(listed))
            elif key == "schema":
                self.schema, self.version = str(value), schema_version(value, self.path)
            elif key == "time":
                self.time = str(value)
        if not self.schema or not len(skeleton):
            raise InvalidCapture(
                f"{self.path}: not an execution trace: expected an object with a schema version and nodes"
                + "".join(f"; {problem}" for problem in self.problems[:1])
            )
        return skeleton.select(roots=roots)

    def nodes(self, selection: ChosenNodes) -> list[tuple[TraceNode, int, bool]]:
        """The chosen nodes in the order in which they ran, with True; between them, with False, the nodes inside them
        that say something about memory or collectives."""
        chosen = set(selection.chosen)
        found = [
            (node, position, position in chosen)
            for position, node in enumerate(self._nodes)
            if node is not None
            and (position in chosen or (selection.inside(position) and node.name.startswith(_TELLING)))
        ]
        return found if selection.ordered else list(_by_id(found, selection.before))


def _by_id(
    found: Iterable[tuple[TraceNode, int, bool]], before: Mapping[int, int]
) -> Iterator[tuple[TraceNode, int, bool]]:
    """The chosen nodes by id, each after the nodes inside it and after those that ran before it."""
    groups: list[list[tuple[TraceNode, int, bool]]] = [[]]
    for each in found:
        groups[-1].append(each)
        if each[2]:
            groups.append([])

    def moment(group: list[tuple[TraceNode, int, bool]]) -> tuple[int, bool]:
        node, position, _chosen = group[-1]
        return before.get(position, node.id), position not in before

    for group in sorted(groups[:-1], key=moment):
        yield from group


_TELLING = ("aten::empty", "record_param_comms")
_KEPT = (*_TELLING, "aten::clone")  # among what is never chosen


class _Marks:
    """Begins and ends scopes to match the marks that each record was inside."""

    def __init__(self, capture: ImportedSession) -> None:
        self._capture = capture
        self._path: MarkPath = ()
        self._scopes: list[int] = []

    def enter(self, path: MarkPath, thread: int) -> int:
        """Enter these marks; returns the scope."""
        if path != self._path:
            common = sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(path, self._path, strict=False)))
            for _position, name in reversed(self._path[common:]):
                self._capture.scope_end(name, Moment(thread=thread, scope=self._scopes.pop()))
            for _position, name in path[common:]:
                scope = self._capture.scope(self._scopes[-1] if self._scopes else 0, name)
                self._scopes.append(scope)
                self._capture.scope_begin(name, Moment(thread=thread, scope=scope))
            self._path = path
        return self._scopes[-1] if self._scopes else 0
