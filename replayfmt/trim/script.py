"""Exports a few ops of a capture as one Python file that needs only torch: to read, to run, to change.

Adds the frame around the ops: a description, the inputs, the timing loop. A script without data fills its inputs with
what a replay of the same ops without content fills them with.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from replayfmt.dump.selection import KeptRecords, OpSelection, resolve_selection
from replayfmt.errors import ReplayRefused, UsageError, first_line
from replayfmt.format.codes import ITEM_BYTES, KernelKind
from replayfmt.format.model import Record, TensorValue, nested_values
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_grammar import row_major
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.initializers import Demand, Registry, Role
from replayfmt.initializers.demands import DEFAULT_STD, FLOATS, float_bounds
from replayfmt.initializers.operator_rules import positive_definite_views
from replayfmt.pytorch.environment import read_settings
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import row_major_bytes
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import Effects, effects_of, effects_of_schema
from replayfmt.replay.planning.scan import Scan, WindowSize
from replayfmt.replay.planning.synthesis import ChosenInitializer, Synthesis
from replayfmt.replay.resolution.kernel_lookup import resolve
from replayfmt.replay.run.run_twice import RunTwice

from .copying import Copier
from .materializing import Materializer
from .schedule import Planner, Schedule, givers, with_producers
from .script_text import BodyWriter, Changes, Input, ScriptBody, ScriptEvents
from .script_triton import ALWAYS_STATED, CodeSections, comment, device, dtype, setting
from .trimming import Prediction, Verify, outputs, predict, refuse_incomplete, refuse_unsupported, writer_of
from .vectors import Array, write_safetensors
from .writing import NoContent, Writing, write_stripped

_FEW = 16  # elements or runs that are written out


@dataclass(frozen=True)
class InputFill:
    """How a script makes an input: elements of `dtype` by an expression, "" for zeros; `why` they are these."""

    dtype: torch.dtype
    expression: str
    why: str


def made_inputs(reader: CaptureReader, kept: KeptRecords, schedule: Schedule) -> dict[int, InputFill]:
    """How inputs of ops are made, by storage. Those that no rule fills are missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ops.opreplay")
        with writer_of(path, reader.session) as writer:
            copier = Copier(reader, writer)
            write_stripped(copier, schedule, kept, annotate=False)
            writer.close(0)
        with CaptureReader(path) as stripped:
            synthesis = _synthesis(stripped)
            chosen = {storage: synthesis.chosen(there) for storage, there in copier.storages.items()}
    return {storage: _made(each) for storage, each in chosen.items() if each is not None}


def _synthesis(reader: CaptureReader) -> Synthesis:
    kernels = tuple(None if each is None else resolve(each, reader.session.torch_version) for each in reader.kernels)

    def effects(_signature: int, layout: SlotLayout) -> Effects:
        number = layout.signature.kernel
        return effects_of(kernels[number], layout, reader.kernels[number])

    return Synthesis(
        reader, Scan(reader, effects, checks=False, window=WindowSize()), kernels, Registry(), lambda info: None
    )


def _made(chosen: ChosenInitializer) -> InputFill:
    dtype = chosen.request.tensor.dtype
    demand = chosen.request.demand or Demand(Role.number)
    if not chosen.request.uses:
        expression = ""
    elif chosen.content is not None:
        expression = _integers(chosen.content, demand)
    elif dtype not in FLOATS:
        expression = ""
    elif demand.role is Role.positive_definite:
        views = [(each.sizes, each.strides, each.offset) for each in positive_definite_views(chosen.request)]
        expression = f"positive_definite(n, g, {views})"
    elif demand.low is None and demand.high is None:
        expression = f"torch.randn(n, generator=g) * {DEFAULT_STD}"
    else:
        low, high = float_bounds(demand)
        expression = f"torch.rand(n, generator=g) * {high - low!r} + {low!r}"
    return InputFill(dtype, expression, demand.why if demand.role is not Role.number else "")


def _integers(content: torch.Tensor, demand: Demand) -> str:
    """An expression for integers like these, which satisfy a demand."""
    values = content.to(torch.int64)
    kinds, counts = values.unique_consecutive(return_counts=True)
    if len(kinds) == 1:
        return f"torch.full((n,), {int(kinds[0])})"
    if len(values) <= _FEW:
        return f"torch.tensor({values.tolist()})"
    if len(kinds) <= _FEW:
        return f"torch.tensor({kinds.tolist()}).repeat_interleave(torch.tensor({counts.tolist()}))"
    low, high = int(values.min()), int(values.max())
    match demand.role:
        case Role.mask:
            return f"torch.randperm(n, generator=g) < {int(values.sum())}"
        case Role.offsets:
            end, steps = (demand.total, len(values) - 1) if demand.total is not None else (demand.high, len(values))
            return f"torch.arange(n) * {int(end or 0)} // {steps}"
        case Role.distinct:
            return f"{low} + torch.randperm(n, generator=g) % {len(values.unique())}"
        case Role.highest:
            return f"torch.randint({low}, {high + 1}, (n,), generator=g).index_fill_(0, torch.tensor([0]), {high})"
        case Role.index:
            low, high = max(int(demand.low or 0), 0), high if demand.high is None else int(demand.high)
    return f"torch.randint({low}, {high + 1}, (n,), generator=g)"


_VIEW = '''
def view(storage, dtype, sizes, strides, offset=0):
    """A tensor on a storage; strides and offset count elements."""
    return torch.empty((0,), dtype=dtype, device=storage.device).set_(storage, offset, sizes, strides)
'''

_LOAD = '''
def read_data():
    """The storages and states in the safetensors file beside this script, by name."""
    with open(Path(__file__).resolve().parent / DATA, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        found = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            file.seek(begin + first)
            found[name] = torch.frombuffer(bytearray(file.read(end - first)) or bytearray(1), dtype=torch.uint8)
        return found


def on(content, nbytes, device):
    """A fresh storage on a device with these bytes."""
    return content[:nbytes].to(device, copy=True).untyped_storage()


def load(storage, number):
    """Overwrite a storage."""
    content = CONTENT[f"content_{number}"]
    torch.empty((0,), dtype=torch.uint8, device=storage.device).set_(storage, 0, (len(content),), (1,)).copy_(content)
'''

_SYNTHESIZE = '''
def synthesize(storage, nbytes, dtype, device, make=None):
    """A fresh storage of what `make` gives for a number of elements and a generator; without it, of zeros."""
    n = nbytes // dtype.itemsize
    tensor = torch.zeros(n + 1, dtype=dtype)
    if make is not None:
        tensor[:n] = make(n, torch.Generator().manual_seed(storage))
    return tensor.view(torch.uint8)[:nbytes].to(device, copy=True).untyped_storage()
'''

_POSITIVE_DEFINITE = '''
def positive_definite(n, g, views):
    """Matrices near the identity in these views (sizes, strides, offset), small numbers elsewhere."""
    content = torch.randn(n, generator=g) * 0.02
    for view in views:
        matrices = content.as_strided(*view)
        matrices.copy_((matrices + matrices.mT) / (10 + matrices.shape[-1]))
        matrices.diagonal(dim1=-2, dim2=-1).add_(1)
    return content
'''

_MAIN = '''
def sha256(tensor):
    """Of a tensor's elements in row-major order."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(flat.data_ptr() if flat.numel() else 0, flat.nbytes)).hexdigest()


def wait():
    """For whatever the accelerator still does."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main():
    results = run(*inputs())
    same = True
    for name, value in results.items():
        if isinstance(value, torch.Tensor):
            digest = sha256(value)
            print(f"{name}: {value.dtype} {list(value.shape)} sha256 {digest}")
            print(value)
        else:
            digest = repr(value)
            print(f"{name}: {value!r}")
        if name in EXPECTED:
            print("  as captured" if digest == EXPECTED[name] else f"  CAPTURED {EXPECTED[name]}")
            same &= digest == EXPECTED[name]
    times = []
    for _ in range(REPEAT):
        given = inputs()
        wait()
        start = time.perf_counter()
        run(*given)
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    print(f"{OPS} ops: median {times[REPEAT // 2]:.1f} us, least {times[0]:.1f} us, of {REPEAT} runs")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def script_helpers(texts: Iterable[str]) -> str:
    """The functions that expressions of a script call."""
    joined = " ".join(texts)
    return (_VIEW if "view(" in joined else "") + (_POSITIVE_DEFINITE if "positive_definite(" in joined else "")


# All names that a script has besides those of its kernels and the numbered ones in `run`.
FRAME = f"{_VIEW}{_LOAD}{_SYNTHESIZE}{_POSITIVE_DEFINITE}{_MAIN} DATA STATES CONTENT EXPECTED"


class _Script:
    """Builds a script of `events`. `settings` are those before the first of them; `code` lets it have the source of
    Triton kernels."""

    def __init__(self, events: ScriptEvents, settings: dict[str, Any], *, code: bool) -> None:
        self._events, self._triton = events, CodeSections(events.reader, code, FRAME)
        self._body: ScriptBody = BodyWriter(events, operator_changes(events.reader), self._triton).write()
        here = read_settings()  # those of a new process, as far as known: they need not be stated, but for some
        self._settings = {
            name: value
            for name, value in settings.items()
            if not name.startswith("autocast.") and (name in ALWAYS_STATED or here.get(name) != value)
        }
        self._inputs = [each for each in events.inputs if each.storage in self._body.first_uses]

    def arrays(self) -> list[Array]:
        data = self._events.writer.by_number
        arrays = []
        for each in self._inputs:
            if each.data is not None:
                first = self._body.first_uses[each.storage]
                arrays.append(Array(f"storage_{each.storage}", data[each.data], first.meta.dtype, _shape(first, each)))
        arrays += [Array(f"content_{number}", data[number]) for number in sorted(self._body.loads)]
        return arrays + [Array(f"state_{number}", data[number]) for number in sorted(self._body.states)]

    def text(
        self,
        wanted: OpSelection,
        kept: KeptRecords,
        data: str | None,
        *,
        hashes: dict[tuple[int, int], str],
        numbers: bool,
        made: dict[int, InputFill],
    ) -> str:
        """The whole script; `data` is the path of the data file relative to it, None if inputs are synthesized, by
        storage as `made` says. `hashes` are the expected results, by ordinal and slot; `numbers` says whether captured
        numbers are results of these inputs."""
        reader, body = self._events.reader, self._body
        if data is None:  # the generator's state is unknown, so it is seeded
            body.generators.update(
                number for number, each in enumerate(reader.generators) if each is not None and each.default
            )
        session = reader.session
        values = (
            "loaded from the file beside this script: the bytes they had"
            if data is not None
            else "synthesized: dtypes, shapes and strides are the captured ones, the values are not"
        )
        head = [
            "#!/usr/bin/env python3",
            f"# {kept.ops} op{'s' if kept.ops > 1 else ''} of a capture ({comment(wanted.text)}), from ordinal "
            f"{kept.first}; session {session.session_id}.",
            f"# Written by opreplay-trim. Needs only {self._triton.needs}; "
            f"captured with {comment(session.torch_version or '?')}.",
            f"# Inputs are {values}.",
            "# After each op: its ordinal in the capture, and its results.",
            "",
            *self._triton.head(),
            "import ctypes",
            "import hashlib",
            *(["import json"] if data is not None else []),
            "import sys",
            "import time",
            *(["from pathlib import Path"] if data is not None else []),
            "",
            "import torch",
            *self._triton.imports(),
            "",
            f"OPS = {kept.ops}",
            "REPEAT = 20",
            *([f"DATA = {data!a}"] if data is not None else []),
            "",
        ]
        head += [setting(name, value) for name, value in self._settings.items()]
        head += [f"g{number} = {self._generator(number)}" for number in sorted(body.generators)]
        if data is None:
            helpers = "\n" + _VIEW + "\n" + _SYNTHESIZE
            if any("positive_definite(" in each.expression for each in made.values()):
                helpers += "\n" + _POSITIVE_DEFINITE
        else:
            helpers = "\n" + _VIEW + "\n" + _LOAD
        after = self._triton.sections()
        if data is not None:
            after += ["", "", "CONTENT = read_data()"]
            states = ", ".join(f"{number}: CONTENT['state_{number}']" for number in sorted(body.states))
            after.append(f"STATES = {{{states}}}")
        expected = self._expected(hashes, numbers)
        after += [
            "",
            "# What the capture says of results: a tensor's SHA-256, a number itself.",
            "EXPECTED = {",
            *(f"    {name!a}: {value!a}," for name, value in expected.items()),
            "}",
        ]
        return (
            "\n".join(
                [
                    *head,
                    helpers.rstrip("\n"),
                    *after,
                    "",
                    "",
                    *self._input_lines(data, made),
                    "",
                    "",
                    *self._run_lines(data),
                ]
            )
            + "\n\n"
            + _MAIN
        )

    def _input_lines(self, data: str | None, made_by: dict[int, InputFill]) -> list[str]:
        lines = ["def inputs():", '    """The storages that the ops start from, fresh each time."""', "    return ["]
        for each in self._inputs:
            first = self._body.first_uses[each.storage]
            stored = self._events.reader.storage(each.storage)
            place = self._events.reader.devices[stored.device]
            sizes = ", ".join(map(str, first.meta.sizes))
            note = f"  # s{each.storage}: {each.length:,} bytes, first used as {first.meta.dtype.name}[{sizes}]"
            if data is not None and each.data is not None:
                lines.append(f"        on(CONTENT['storage_{each.storage}'], {each.length}, {device(place)}),{note}")
            elif data is not None:
                lines.append(
                    f"        on(torch.zeros({each.length}, dtype=torch.uint8), {each.length}, {device(place)}),{note}"
                )
            else:
                made = made_by.get(each.storage)
                how = f", lambda n, g: {made.expression}" if made is not None and made.expression else ""
                of = dtype(first.meta.dtype) if made is None else str(made.dtype)
                why = f"; {comment(made.why)}" if made is not None and made.why else ""
                lines.append(
                    f"        synthesize({each.storage}, {each.length}, {of}, {device(place)}{how}),{note}{why}"
                )
        return [*lines, "    ]"]

    def _run_lines(self, data: str | None) -> list[str]:
        taken = ", ".join(f"s{each.storage}" for each in self._inputs)
        given = ", ".join(f"{name!a}: {value}" for name, value in self._body.returned.items())
        seeds = [f"    g{number}.manual_seed(0)" for number in sorted(self._body.generators)] if data is None else []
        return [
            f"def run({taken}):",
            '    """The ops, in the order of the capture. Returns the results that no later op uses."""',
            *seeds,
            *(f"    {line}" for line in self._body.lines),
            f"    return {{{given}}}",
        ]

    def _generator(self, number: int) -> str:
        generator = self._events.reader.generators[number]
        place = self._events.reader.devices[generator.device]
        if not generator.default:
            return f"torch.Generator({device(place)})"
        if place.kind == "cpu":
            return "torch.default_generator"
        module = f"torch.get_device_module({place.kind!r})"
        return f"({module}.init(), {module}.default_generators[{max(place.index, 0)}])[1]"

    def _expected(self, hashes: dict[tuple[int, int], str], numbers: bool) -> dict[str, str]:
        """The expected values: known for tensors if they were computed, for numbers if the content is the captured
        one."""
        expected = {name: hashes[where] for name, where in self._body.tensors.items() if where in hashes}
        if numbers:
            for event in self._events.events:
                if isinstance(event, Record):
                    for index, value in enumerate(event.results):
                        if isinstance(value, bool | int | float | complex | str):
                            expected[f"value_{event.ordinal}_{index}"] = repr(value)
        return expected


def _shape(first: TensorValue, given: Input) -> tuple[int, ...]:
    """The sizes of a storage's first tensor if that covers it, else one dimension."""
    meta = first.meta
    if not first.offset and meta.bytes == given.length and row_major(meta.sizes, meta.strides):
        return meta.sizes
    return (given.length // ITEM_BYTES[meta.dtype],)


MOST_OPS = 2000  # per script; a longer one is unreadable


@dataclass(frozen=True)
class ScriptResult:
    """What was written. `verified` is empty if nothing was replayed."""

    path: str
    ops: int
    inputs: int
    data_path: str | None
    data_bytes: int
    verified: str = ""


def synthesized_script(
    reader: CaptureReader,
    out: str,
    wanted: OpSelection,
    *,
    force: bool = False,
    allow_incomplete: bool = False,
    allow_code: bool = False,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> ScriptResult:
    """Write a script that synthesizes its inputs. `allow_code` lets it have the source of Triton kernels, which
    runs with it. Raises UsageError, OutputExists, ReplayRefused for ops that a script cannot express."""
    refuse_incomplete(reader, allow_incomplete)
    with outputs(reader, force, out) as (partial,):
        kept = _resolved(reader, wanted)
        schedule = Planner(reader, kept, None).plan()
        on_prediction(predict(reader, kept, schedule, content=False))
        events = ScriptEvents(reader)
        Writing(cast(Copier, events), schedule, kept, NoContent(reader), annotate=False).finish()
        made = made_inputs(reader, kept, schedule)
        script = _Script(events, schedule.settings, code=allow_code)
        text = script.text(wanted, kept, None, hashes={}, numbers=False, made=made)
        Path(partial).write_text(text, encoding="utf-8")
        return ScriptResult(out, kept.ops, len(events.inputs), None, 0)


def script_with_data(
    plan: Plan,
    out: str,
    data: str,
    wanted: OpSelection,
    *,
    verify: Verify = "auto",
    force: bool = False,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> ScriptResult:
    """Write a script and its inputs from a verified replay. Raises what `trim_capture` raises, and ReplayRefused for
    ops that a script cannot express."""
    reader = plan.reader
    with outputs(reader, force, out, data) as (partial, partial_data):
        while True:  # each time more results with bytes that no replay reproduces are known
            kept = with_producers(
                reader, _resolved(reader, wanted), plan.preparation.opaque_slots(), plan.preparation.writes
            )
            schedule = Planner(reader, kept, plan.preparation.writes).plan()
            on_prediction(predict(reader, kept, schedule))
            refuse_unsupported(reader, kept, schedule)
            events = ScriptEvents(reader)
            watcher = _Hashing(plan, cast(Copier, events), schedule, kept, digests=False, references=False)
            twice = RunTwice(plan.generators, givers(reader, schedule, kept.stop, plan.preparation.writes))
            verification, divergence = plan.watch(watcher, kept.stop, verify, stand_in=twice)
            if plan.may_be_taken(twice, divergence, verify):
                break
        watcher.finish()
        script = _Script(events, schedule.settings, code=True)  # else the plan has refused the kernels that need it
        beside = os.path.relpath(data, os.path.dirname(os.path.abspath(out)))
        text = script.text(wanted, kept, beside, hashes=watcher.hashes, numbers=not plan.synthesis.reason, made={})
        Path(partial).write_text(text, encoding="utf-8")
        arrays = script.arrays()
        write_safetensors(partial_data, arrays)
        return ScriptResult(
            out, kept.ops, len(events.inputs), data, sum(len(each.data) for each in arrays), verification.text
        )


class _Hashing(Materializer):
    """Also keeps a hash of every reproducible result, by ordinal and slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hashes: dict[tuple[int, int], str] = {}

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        super().after(ordinal, results, args)
        assert self._record is not None
        written = self._written(self._record, self._kernel_of(self._record))
        outputs = {slot: tensor for slot, tensor in args.items() if slot in written}
        for slot, tensor in {**outputs, **results}.items():
            if self.is_reproducible(slot, tensor):
                self.hashes[ordinal, slot] = hashlib.sha256(row_major_bytes(tensor)).hexdigest()  # as the script


def _resolved(reader: CaptureReader, wanted: OpSelection) -> KeptRecords:
    kept = resolve_selection(reader, wanted)
    if kept.ops > MOST_OPS:
        raise UsageError(
            f"{wanted.text}: {kept.ops} ops are too many for a script, {MOST_OPS} are the most; select "
            "fewer, or write a capture"
        )
    return kept


def operator_changes(reader: CaptureReader) -> Changes:
    """The arguments whose metadata an op changes in place, and those that it writes."""

    def changes(record: Record) -> tuple[set[int], set[int]]:
        kernel = reader.kernels[record.signature.kernel]
        if kernel.kind is not KernelKind.operator:
            try:
                schema = parse_schema(kernel.schema)
            except (RuntimeError, ValueError) as error:
                raise ReplayRefused(
                    f"{reader.path}: {kernel.qualified_name}: its schema: {first_line(error)}"
                ) from None
            written = effects_of_schema(SlotLayout(record.signature), schema, False, complete=True)
            return set(), set(written.writes)
        resolved = resolve(kernel, reader.session.torch_version)
        if isinstance(resolved, str):
            raise ReplayRefused(f"{reader.path}: ordinal {record.ordinal}: {resolved}")
        effects = resolved.effects(SlotLayout(record.signature))
        ids = [each.id for each in nested_values((*record.args, *record.results)) if isinstance(each, TensorValue)]
        changed = {slot for slot, result in effects.rebinds if ids[slot] != ids[result]} | set(effects.reshapes)
        return changed, set(effects.writes)

    return changes
