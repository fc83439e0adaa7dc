"""Preparation of a replay: the capture is opened, and everything is checked that can be without running an op.

Kernels are resolved, devices mapped, files found and the records read once; every reason against a replay is collected.
`ReplayOptions` says what a replay runs on and what it accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from typing import Any, TypedDict

import torch

from replayfmt.collector import collector_paused
from replayfmt.errors import InvalidCapture, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import OPAQUE_RESULTS, Signature, tensors_of
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.format.source import Closing
from replayfmt.format.validation import check_kind, choice_of, flag_of, texts_of
from replayfmt.initializers import Initializer, Registry
from replayfmt.pytorch.operators import OpaqueResults, OpaqueSpec

from .codegen.streams import STREAMS_MODES, StreamsMode
from .planning.devices import map_devices, map_generators
from .planning.external_files import ExternalFiles
from .planning.findings import Findings
from .planning.kernels import Addresses, Effects, ResolvedKernel, addresses_of, effects_of
from .planning.records import Slice, Slicer, Work, count_work
from .planning.scan import Scan, WindowSize
from .planning.synthesis import Synthesis, captured_content
from .resolution.graph_kernels import GRAPHS_MODES, GraphsMode, PreparedGraphs
from .resolution.kernel_lookup import AllowedCode, AllowedImports, resolve
from .results import OpaqueResult
from .substitution.distance import Tolerance
from .substitution.table import AUTOTUNE_MODES, AutotuneMode, SubstitutionChoice, load_requests


@dataclass(frozen=True)
class ReplayOptions:
    """Raises UsageError for values of another kind.

    `file_remaps` are CAPTURED=REPLAY pairs of path prefixes, and say where external files are now. `initializers` fill
    what was not captured, before those that are registered and built in; `initializer_options` are for them
    (`moe-routing`: uniform, zipf or zipf:EXPONENT). `substitutions` puts other functions in place of kernels: texts as
    on the command line, Substitution objects, or a function that decides for each Call; `substitution_tolerance` is how
    far their results may be off. `allow_imports` names modules to import for the operators that they register (a
    capture causes no other), `allow_operators` operators that may run although they do more than compute on tensors.
    `allow_code` lets machine code and source in the capture run, with the rights of this process (SECURITY.md). With
    `keep_going` a plan is made of what can run, and has its findings. `opaque_results`, `streams`, `graphs` and
    `autotune` are those of the flags.
    """

    devices: Sequence[str] = ()
    allow_incomplete: bool = False
    keep_going: bool = False
    file_remaps: Sequence[str] = ()
    initializers: Sequence[Initializer] = ()
    initializer_options: Mapping[str, str] | None = None
    substitutions: SubstitutionChoice = ()
    substitution_tolerance: Tolerance = Tolerance()
    allow_imports: Iterable[str] = ()
    allow_operators: Iterable[str] = ()
    allow_code: bool = False
    opaque_results: Iterable[str] = ()
    streams: StreamsMode = "captured"
    graphs: GraphsMode = "captured"
    autotune: AutotuneMode = "captured"
    window: WindowSize = WindowSize()

    def __post_init__(self) -> None:
        choice_of("streams", self.streams, STREAMS_MODES)
        choice_of("graphs", self.graphs, GRAPHS_MODES)
        choice_of("autotune", self.autotune, AUTOTUNE_MODES)
        check_kind("window", self.window, WindowSize)
        check_kind("substitution_tolerance", self.substitution_tolerance, Tolerance)
        for name in ("allow_incomplete", "keep_going", "allow_code"):
            flag_of(name, getattr(self, name))


class MorePlanOptions(TypedDict, total=False):
    """Fields of ReplayOptions, as keywords of `Plan` after the first."""

    file_remaps: Sequence[str]
    initializers: Sequence[Initializer]
    initializer_options: Mapping[str, str] | None
    substitutions: SubstitutionChoice
    substitution_tolerance: Tolerance
    allow_imports: Iterable[str]
    allow_operators: Iterable[str]
    allow_code: bool
    opaque_results: Iterable[str]
    streams: StreamsMode
    graphs: GraphsMode
    autotune: AutotuneMode
    window: WindowSize


class PlanOptions(MorePlanOptions, total=False):
    """Fields of ReplayOptions, as keywords of the functions that replay."""

    devices: Sequence[str]
    allow_incomplete: bool


_SHOWN_KERNELS = 5
_LOOKED_BACK = 20_000  # records that are searched for the op that wrote what differs


class Preparation(Closing):
    """A capture checked for a group of devices. Owns what it opened until `close`."""

    def __init__(
        self, capture: Any, options: ReplayOptions, on_file_bytes: Callable[[int, int], None] | None = None
    ) -> None:
        """See `Plan`."""
        self.options = options
        with ExitStack() as opened:
            self.reader = _opened(capture, opened)
            self.files = ExternalFiles(self.reader, options.file_remaps)
            opened.callback(self.files.close)
            self.opaque = OpaqueResults([*_stated(self.reader), *_matching(self.reader, options.opaque_results)])
            self._opaque_results: tuple[OpaqueResult, ...] | None = None  # listed because the last one was found
            self._imports = AllowedImports(options.allow_imports, options.allow_operators)
            self.device_map, self._unmapped = map_devices(self.reader.devices, texts_of("devices", options.devices))
            types = frozenset(device.type for device in self.device_map.in_use())
            self._code = AllowedCode(self.reader, options.allow_code, types)
            self._code.prepare()
            self._graphs = PreparedGraphs(
                self.reader,
                self.device_map,
                self._imports,
                allow_code=options.allow_code,
                mode=options.graphs,
                streams=options.streams,
                window=options.window,
            )
            opened.callback(self._graphs.close)
            # Before kernels are resolved: a replacement's file may import the library of what it replaces.
            self.replacements = load_requests(options.substitutions)
            self._prepare(on_file_bytes)
            self._opened = opened.pop_all()

    @collector_paused()
    def _prepare(self, on_file_bytes: Callable[[int, int], None] | None) -> None:
        reader, sentences = self.reader, list(self._unmapped)
        if not reader.complete and not self.options.allow_incomplete:
            sentences.insert(
                0, f"the capture is incomplete ({reader.incomplete_reason}); --allow-incomplete replays what is there"
            )
        self.kernels: tuple[ResolvedKernel | str | None, ...] = tuple(
            None
            if kernel is None
            else resolve(kernel, reader.session.torch_version, self._imports, self._code, self._graphs.resolve)
            for kernel in reader.kernels
        )
        self._effects: dict[int, Effects] = {}
        self._scans: dict[bool, Scan] = {}
        scan = self.scan(checks=False)
        findings = Findings(reader, self.device_map, self.kernels, scan)
        findings.collect()
        registry = Registry(self.options.initializers, self.options.initializer_options)
        self._file_findings = self.files.validate(on_file_bytes)
        self.synthesis = Synthesis(
            reader, scan, self.kernels, registry, partial(captured_content, reader, scan, self.files)
        )
        self.findings = (
            *sentences,
            *self._imports.problems,
            *findings.sentences,
            *self._file_findings,
            *self.synthesis.findings,
        )
        self.refused = findings.refused
        self._refuse(bool(sentences), "nothing was run")
        if self._load_code():
            found = Findings(reader, self.device_map, self.kernels, scan)
            found.collect(unsupported=False)
            self.refused = found.refused
            self.findings = (*self.findings, *(each for each in found.sentences if each not in self.findings))
            self._refuse(False, "no op was run")
        self._draw_notes = findings.notes
        self.elsewhere = tuple(findings.elsewhere)
        """What child processes did that the capture does not hold."""
        self.generators: tuple[torch.Generator | None, ...] = map_generators(
            reader.generators, self.device_map, bool(findings.notes)
        )
        """What stands for each captured generator, by id; None if its numbers cannot be drawn here."""

    def _refuse(self, anyhow: bool, ran: str) -> None:
        """Raises ReplayRefused with the findings, if there are any (`anyhow`: some that nothing gets around)."""
        if not anyhow and (self.options.keep_going or not self.findings):
            return
        count = len(self.findings)
        reasons = f"{count} reason{'s' if count > 1 else ''}"
        found = self._code.advice or self._graphs.advice
        advice = f"; {found}" if found else ""
        raise ReplayRefused(f"{self.reader.path}: cannot be replayed here, for {reasons}; {ran}{advice}", self.findings)

    def _load_code(self) -> bool:
        """Load the kernels that are called, now that they may be. Returns whether one could not be loaded."""
        ops = self.scan(checks=False).occurring(RecordKind.op)
        called = {signature.kernel for number, signature in ops if number not in self.refused}
        before = self.kernels
        self.kernels = tuple(
            each.loaded() if number in called and isinstance(each, ResolvedKernel) else each
            for number, each in enumerate(before)
        )
        return any(isinstance(now, str) and now is not then for now, then in zip(self.kernels, before, strict=True))

    def slice(self, ordinals: Collection[int]) -> Slice:
        """What a replay of the ops at these ordinals needs from the capture, and can compare."""
        scan = self.scan(checks=False)
        imported = "import" in self.reader.session.policies  # it draws other numbers than the program did

        def draws(number: int) -> bool:
            kernel = self.kernels[number]
            return not imported and isinstance(kernel, ResolvedKernel) and kernel.draws

        return Slicer(self.reader, scan.effects, draws).slice(ordinals)

    @property
    def devices(self) -> list[torch.device]:
        """The devices that participate, accelerators first."""
        return self.device_map.in_use()

    @property
    def scopes(self) -> tuple[str, ...]:
        """Path of every scope of the capture, in order of first entry."""
        return tuple(self.reader.scope_path(scope) for scope in range(1, len(self.reader.scopes)))

    @property
    def calls_inside_graphs(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that the bodies of the capture's graphs call, each with the graphs that do."""
        return self._graphs.calls_inside

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know about how the capture is replayed."""
        threads = len(self.scan(checks=False).threads)
        serialized = (f"the work of {threads} threads is replayed by one, in capture order",) if threads > 1 else ()
        return (
            *serialized,
            *self._code_notes(),
            *self._draw_notes,
            *self.files.notes,
            *self.synthesis.notes,
            *self.reader.warnings,
        )

    def _code_notes(self) -> Iterator[str]:
        """What runs the kernels that are no operators."""
        found: dict[str, list[str]] = {}
        for kernel, resolved in zip(self.reader.kernels, self.kernels, strict=True):
            if kernel is not None and isinstance(resolved, ResolvedKernel) and resolved.how:
                found.setdefault(f"{kernel.kind.name} kernel%s {resolved.how}", []).append(kernel.name)
        for what, names in found.items():
            plural = "s are" if len(names) > 1 else " is"
            yield f"{len(names)} {what % plural}: {', '.join(sorted(set(names))[:_SHOWN_KERNELS])}"

    def scan(self, *, checks: bool) -> Scan:
        """The first pass over the records, made once for replays that verify and once for those that do not."""
        if checks not in self._scans:
            self._scans[checks] = Scan(self.reader, self.effects, checks=checks, window=self.options.window)
        return self._scans[checks]

    def effects(self, signature_id: int, layout: SlotLayout) -> Effects:
        """What an op of this signature does to its arguments."""
        if signature_id not in self._effects:
            number = layout.signature.kernel
            self._effects[signature_id] = effects_of(self.kernels[number], layout, self.reader.kernels[number])
        return self._effects[signature_id]

    @cached_property
    def work(self) -> Work:
        """How much there is to run and to compare."""
        return count_work(self.reader, self.scan(checks=False))

    def opaque_slots(self) -> dict[int, tuple[int, ...]]:
        """The tensor slots of results that hold bytes no replay reproduces, by op signature."""
        found = {}
        for number, signature in enumerate(self.reader.signatures):
            opaque = self._opaque_of(signature)
            if opaque:
                results = self.scan(checks=False).layout(number).results
                found[number] = tuple(slot for index in opaque for slot in results[index].tensors)
        return found

    def know_opaque(self, found: Iterable[tuple[str, str, int, str]]) -> None:
        """These results (operator, overload, index, why) are found to be opaque, too."""
        for each in found:
            self.opaque.found(*each)
        self._opaque_results = None

    def opaque_results(self) -> tuple[OpaqueResult, ...]:
        """These results: their operator, how often it is called, and why they are not compared."""
        if self._opaque_results is not None:
            return self._opaque_results
        calls: dict[tuple[str, int, str], int] = {}
        for number, signature in enumerate(self.reader.signatures):
            for index, why in self._opaque_of(signature).items():
                key = (self.reader.kernels[signature.kernel].qualified_name, index, why)
                calls[key] = calls.get(key, 0) + int(self.scan(checks=False).signature_calls[number])
        self._opaque_results = tuple(OpaqueResult(*key, count) for key, count in calls.items() if count)
        return self._opaque_results

    def _opaque_of(self, signature: Signature | None) -> Mapping[int, str]:
        if signature is None or signature.kind is not RecordKind.op:
            return {}
        kernel = self.reader.kernels[signature.kernel]
        opaque = self.opaque.of(kernel.name, kernel.overload, len(signature.results))
        addresses = self._addresses_of(signature)
        return {**opaque, **dict.fromkeys(addresses.results, "it is an address")} if addresses else opaque

    def _addresses_of(self, signature: Signature) -> Addresses | None:
        resolved = self.kernels[signature.kernel]
        if not isinstance(resolved, ResolvedKernel) or resolved.own:
            return None
        return addresses_of(SlotLayout(signature), resolved.schema)

    def runs_once(self, signature_id: int) -> bool:
        """Whether an op of this signature does something that cannot be done twice."""
        signature = self.reader.signatures[signature_id]
        addresses = None if signature is None else self._addresses_of(signature)
        return addresses is not None and addresses.once

    def writes(self, signature_id: int) -> tuple[int, ...]:
        """The tensor slots that an op of this signature may write, announced or not."""
        scan = next(iter(self._scans.values()), None) or self.scan(checks=False)  # layouts are the same in both
        effects = self.effects(signature_id, scan.layout(signature_id))
        return effects.writes + effects.unsure

    def last_writer(self, ordinal: int) -> int | None:
        """The ordinal of the last op before a record that wrote what the record's first tensor is in; None if there is
        none among the `_LOOKED_BACK` records before."""
        storage = next((each.storage for each in tensors_of(self.reader.record(ordinal).args)), None)
        for earlier in range(ordinal - 1, max(ordinal - _LOOKED_BACK, 0) - 1, -1) if storage is not None else ():
            record = self.reader.record(earlier)
            if record.kind is not RecordKind.op:
                continue
            taken = [each.storage for each in tensors_of(record.args)]
            if storage not in taken:
                if any(each.storage == storage for each in tensors_of(record.results)):
                    return earlier
                continue
            frame = self.reader.frame(self.reader.frame_of(earlier))
            written = self.writes(int(frame.signature[earlier - frame.first_ordinal]))
            if any(taken[slot] == storage for slot in written):
                return earlier
        return None

    def findings_before(self, scan: Scan) -> tuple[str, ...]:
        """The reasons against replaying what a scan of the first records covers."""
        findings = Findings(self.reader, self.device_map, self.kernels, scan)
        findings.collect(unsupported=False)
        return (*self._imports.problems, *findings.sentences, *self._file_findings, *self.synthesis.findings)

    def close(self) -> None:
        """Release the external files, and the capture if it was opened here."""
        self._opened.close()


def _stated(reader: CaptureReader) -> list[str]:
    """What the capture says about results that hold bytes no replay reproduces. Raises InvalidCapture."""
    stated = reader.session.policies.get(OPAQUE_RESULTS, "")
    try:
        return [str(OpaqueSpec.parse(text)) for text in str(stated).split()]
    except UsageError as error:
        raise InvalidCapture(f"{reader.path}: its policy {OPAQUE_RESULTS}: {error}") from None


def _matching(reader: CaptureReader, given: Iterable[str]) -> list[str]:
    """What the user says about them. Raises UsageError for a result that no operator of the capture has."""
    asked = list(texts_of("opaque_results", given))
    ops = (each for each in reader.signatures if each is not None and each.kind is RecordKind.op)
    called = [(reader.kernels[each.kernel], len(each.results)) for each in ops]
    wrong = OpaqueResults(asked).unmatched((kernel.name, kernel.overload, count) for kernel, count in called)
    if wrong:
        raise UsageError(f"{reader.path}: {wrong[0]}")
    return asked


def _opened(capture: Any, opened: ExitStack) -> CaptureReader:
    if isinstance(capture, str | PathLike):
        return opened.enter_context(open_capture(capture))
    reader = getattr(capture, "reader", capture)
    if not isinstance(reader, CaptureReader):
        raise UsageError(f"a plan is made of a path or an open capture, not of {type(capture).__name__}")
    return reader
