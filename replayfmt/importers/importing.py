"""Imports any kind of trace: detects a file's kind, finds the traces of all ranks, and calls the kind's importer.

Which tool made a trace is detected by its content, never by its name (`sniff`). Of an archive or a directory,
`rank_traces` says which file belongs to which rank: the rank is taken from the trace itself (a profiler trace's
`distributedInfo`, an execution trace's collectives of all ranks), else from its name (`rank_3.json`,
`rank3/trace.json`), else from the only number in which the names differ.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from replayfmt.collector import collector_paused
from replayfmt.errors import (
    CaptureFailed,
    CaptureNotFound,
    InvalidCapture,
    OpReplayError,
    UnsupportedVersion,
    UsageError,
)
from replayfmt.format.output import RANK_FILE, check_place, is_folder, same_file
from replayfmt.format.rank_files import write_manifest
from replayfmt.format.validation import choice_of, count_of, flag_of, items_of, path_of, paths_of, text_of, texts_of
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.traced_names import TracedNames

from .common.inductor_cache import InductorCache
from .common.json_stream import JsonStream
from .common.options import ImportOptions, Level, Rewrite, TraceRange, parse_time
from .common.report import ImportReport
from .common.results import dynamo_unneeded
from .common.synthesis import PRODUCER
from .common.trace_files import (
    MOST_RANKS,
    Progress,
    RankTrace,
    TraceFile,
    archive_names,
    is_archive,
    is_json,
    regular_length,
    shown_names,
)
from .execution_trace.nodes import GROUPS, groups_listed, node_of, rank_said, world_said
from .kineto.importer import distributed

TraceKind = Literal["kineto", "execution-trace", "tracelens"]
KINDS: tuple[TraceKind, ...] = get_args(TraceKind)
_READ = 64  # entries inspected, at most: the distinguishing ones are at the beginning


# What other profilers' files begin with, and how to get at their work.
_FOREIGN = (
    (rb"SQLite format 3\0", "an SQLite database (rocprofv3's rocpd, rpd, Nsight Systems)"),
    (rb"\s*\{\s*\"rocprofiler-sdk-tool\"", "rocprofv3's JSON (kernels without PyTorch operators)"),
    (
        rb'\s*\{(?:\s*"\w{1,80}": \[\s*\{)?\s*"name": "[^\n]{1,3000}?",\s*(?:"count": \d{1,9},\s*)?'
        rb'"device": "?\d{1,4}"?,\s*"signature": ',
        "a list of distinct device kernels (import the profiler trace that it was made from)",
    ),
    (
        rb'\s*\{\s*"summary": \{\s*"total_kernels"',
        "a file of kernel signatures (import the profiler trace that it was made from)",
    ),
    (
        rb"\s*\{\s*\"(?:(?:start_timestamp\": [^\n]{1,80}\n?\s*\")?end_timestamp\": [^\n]{1,80}\n?\s*"
        rb"\"(?:kernels|energy_joules|duration_seconds|full_model_inference_ms)"
        rb"|full_model\": \{\s*\"num_runs|error_percent\": [^\n]{1,80}\n?\s*\"error_us)\"",
        "a table of measured times without PyTorch operators (opreplay-energy integrates power logs over such)",
    ),
    (
        rb"(?:name,device,count,signature_json|device,category,kernel_name,count)\s",
        "a table of device kernels and their counts (import the profiler trace that it was made from)",
    ),
    (
        rb"time(?:stamp)?,(?:id|gpu|power)\w*[,\r\n]",
        "a power log (opreplay-energy integrates it over measured windows)",
    ),
    (rb'"?[\w-]+"?,[^\n]{0,400}"?Kernel_?Name"?', "rocprof's table of kernels (without PyTorch operators)"),
    (
        rb"\x0a[\s\S]{0,4000}(?:/host:|/device:|Task Environment)",
        "an XPlane profile of XLA (JAX, TensorFlow, PyTorch/XLA)",
    ),
    (rb"[\x01-\x7f]\x0a[\x01-\x20]\d{1,9}\.\d{1,9}\.\d", "a Chakra execution trace in protobuf"),
    (
        rb"\s*[\[{][\s\S]{0,4000}\"(?:ctrlDeps|dataDeps|durationMicros|COMP_NODE|COMM_COLL_NODE)\"",
        "a Chakra execution trace in JSON",
    ),
    (rb"\s*\{[\s\S]{0,400}\"highres-ticks\"", "a trace of XLA's profiler (JAX, TensorFlow), without PyTorch operators"),
    (
        rb"\s*\{[\s\S]{0,4000}\"(?:CudaEvent|NvtxEvent|TraceProcessEvent)\"",
        "Nsight Systems' JSON, without PyTorch operators",
    ),
    (rb"\s*\{[\s\S]{0,4000}\"https://www\.speedscope\.app/", "a speedscope profile"),
    (rb"\x0a[\x01-\xff][\x00-\x7f]?[\x18\x32\x38\x40\x50]", "a Perfetto trace in protobuf"),
)
# What JSON may be packed in, of which gzip, tar and zip are read.
_PACKED = (
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (rb"BZh[1-9]", "compressed with bzip2"),
    (rb"\xfd7zXZ\0", "compressed with xz"),
    (rb"\x04\x22\x4d\x18", "compressed with LZ4"),
    (rb"7z\xbc\xaf", "a 7z archive"),
    (rb"\x78[\x01\x5e\x9c\xda]", "compressed with zlib"),
    (rb"\x1f\x8b", "compressed twice"),
    (rb"\xff\xfe|\xfe\xff|\0{1,3}[\[{]|[\[{]\0", "text in UTF-16 or UTF-32, not UTF-8"),
)
_HEAD_BYTES = 4096


def _foreign(path: str | PathLike[str], member: str) -> str:
    """What a file that is not read seems to be, by its beginning, and what to do; "" where it is not known."""
    with TraceFile(path, member=member) as file:
        head = file.read(_HEAD_BYTES)
    for pattern, what in _FOREIGN:
        if re.match(pattern, head):
            return (
                f"it is {what}, which is not read; record the program with torch.profiler or ExecutionTraceObserver, "
                "or export it to their JSON"
            )
    packed = next((what for pattern, what in _PACKED if re.match(pattern, head)), "")
    return packed and f"it is {packed}, which is not read; convert it first: JSON in UTF-8, as it is or in gzip"


@contextmanager
def _foreign_named(path: str | PathLike[str], member: str) -> Iterator[None]:
    """Inside, a trace that is refused for what is in it is called what it is, where that is known."""
    try:
        yield
    except InvalidCapture:
        what = _foreign(path, member)
        if what:
            raise UnsupportedVersion(f"{fspath(path)}: {what}") from None
        raise


def sniff(path: str | PathLike[str], member: str = "") -> TraceKind:
    """The kind of a trace file, or of one file of an archive. Raises CaptureNotFound, and InvalidCapture if the kind is
    unknown."""
    with _foreign_named(path, member):
        return _sniff(path, member)


def _sniff(path: str | PathLike[str], member: str) -> TraceKind:
    regular_length(path)
    if zipfile.is_zipfile(path) and any(name.endswith("event_replay_ir.json") for name in archive_names(path)[0]):
        return "tracelens"
    with JsonStream.open(path, member=member) as stream:
        for seen, (key, value) in enumerate(stream.entries({"traceEvents", "nodes"})):
            if key == "traceEvents" or (key == "" and isinstance(value, dict) and "ph" in value):
                return "kineto"
            if key == "nodes":
                return "execution-trace"
            if key == "" and isinstance(value, dict) and ("replay_ir" in value or "op_name" in value):
                return "tracelens"
            if seen >= _READ:
                break
    with JsonStream.open(path, member=member) as stream:  # an empty list has no entries to inspect
        if any(entry == ("traceEvents", []) for entry in islice(stream.entries(()), _READ)):
            raise InvalidCapture(
                f"{path}: the trace has no operator events: its traceEvents are empty; profile with "
                "activities=[ProfilerActivity.CPU, ...] while operators run"
            )
        which = "" if member else ", the archive's first JSON file,"
        told = f": {stream.member}{which} is" if stream.member else ":"
        problem = f" ({stream.problems[0]})" if stream.problems else ""
    raise InvalidCapture(
        f"{path}{told} not a known kind of trace: expected a PyTorch profiler trace (traceEvents), a "
        f"PyTorch execution trace (nodes), or TraceLens replay IR (op_name and replay_ir){problem}"
    )


_MOST_FILES = 1 << 16
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")  # in a directory: one trace each, with its resources
# The last number after the word; not of a rank within one machine.
_RANK = re.compile(r"(?<![a-z])(?<!local[_-])rank[ _.=-]?(\d{1,8})(?!\d)", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")


@dataclass
class _Candidate:
    path: str
    member: str
    name: str  # within the archive or the directory
    kind: TraceKind
    rank: int | None = None
    told: str = ""
    world_size: int = 1


@dataclass
class RankTraces:
    """The traces of one kind in an archive or a directory. `problems` are sentences about what may be missing."""

    source: str
    kind: TraceKind
    candidates: list[_Candidate]
    passed_over: list[str]
    problems: list[str] = field(default_factory=list)

    def of(self, rank: int) -> RankTrace:
        """The trace of one rank. Raises UsageError if there is none, or more than one."""
        found = [each for each in self.candidates if each.rank == rank]
        if len(found) == 1:
            return self._trace(found[0])
        if found:
            raise UsageError(f"{self.source}: {_several(rank, found)}")
        ranks = sorted({each.rank for each in self.candidates if each.rank is not None})
        raise UsageError(
            f"{self.source}: has no trace of rank {rank}; "
            + (f"it has those of {_shown_ranks(_spans(ranks))}" if ranks else "no trace in it shows its rank")
            + self._untold()
        )

    def all(self, *, whole: bool = False) -> list[RankTrace]:
        """The traces of all ranks, in order. Raises UsageError unless each has a different rank; with `whole`, also if
        one is not there, or if they do not agree on how many there are."""
        ranks: dict[int, list[_Candidate]] = {}
        for each in self.candidates:
            if each.rank is None:
                raise UsageError(f"{self.source}: not every trace in it shows its rank{self._untold()}")
            ranks.setdefault(each.rank, []).append(each)
        for rank, found in sorted(ranks.items()):
            if len(found) > 1:
                raise UsageError(f"{self.source}: {_several(rank, found)}")
        world = self._world_size()
        absent = [(low + 1, high - 1) for low, high in pairwise([-1, *sorted(ranks), world]) if high - low > 1]
        told = f"of {world} ranks, the traces of {_shown_ranks(absent)} are not there" if absent else ""
        worlds = {each.world_size: each.name for each in self.candidates if each.world_size > 1}
        if whole and len(worlds) > 1:
            said = "; ".join(f"{name} is of {size} ranks" for size, name in sorted(worlds.items()))
            raise UsageError(f"{self.source}: the traces are of different jobs: {said}")
        if whole and told:
            raise UsageError(f"{self.source}: {told}; give those of all, or -o step.{{rank}}.opreplay")
        self.problems += [told] if told else []
        return [self._trace(found[0]) for _rank, found in sorted(ranks.items())]

    def _trace(self, found: _Candidate) -> RankTrace:
        assert found.rank is not None
        return RankTrace(found.path, found.member, found.rank, found.told, self._world_size())

    def _world_size(self) -> int:
        return max(max(each.world_size, (each.rank or 0) + 1) for each in self.candidates)

    def _untold(self) -> str:
        untold = [each.name for each in self.candidates if each.rank is None]
        if not untold:
            return ""
        return (
            f"; neither content nor name shows the rank of {shown_names(untold)}: rename it (rank_0.json), or "
            "import it alone without --rank"
        )


def rank_traces(
    path: str | PathLike[str] | Sequence[str | PathLike[str]], kind: TraceKind | Literal["auto"] = "auto"
) -> RankTraces:
    """Search archives, directories (with subdirectories), or single files. With `kind`, only for traces of that kind.

    Raises CaptureNotFound and InvalidCapture if there is no trace, UsageError if there are traces of several kinds and
    `kind` does not say which is meant.
    """
    sources = [fspath(path)] if isinstance(path, str | PathLike) else [fspath(each) for each in path]
    source = ", ".join(sources)
    files, problems = _files(sources[0]) if len(sources) == 1 else ([], [])
    if len(sources) > 1:
        for part in sources:
            of_it, wrong = _files(part)
            files += [(file, member, f"{part}: {member}" if member else file) for file, member, _name in of_it]
            problems += wrong
    found: list[_Candidate] = []
    passed: list[str] = []
    for file, member, name in files:
        try:
            sniffed = sniff(file, member)
        except (InvalidCapture, CaptureNotFound):
            if len(files) == 1:
                raise
            passed.append(name)
            continue
        if kind in ("auto", sniffed):
            found.append(_Candidate(file, member, name, sniffed))
    kinds = sorted({each.kind for each in found})
    if "tracelens" in kinds:
        raise UsageError(f"{source}: TraceLens IR lists single calls without a rank; import it without --rank")
    if len(kinds) > 1:
        raise UsageError(f"{source}: has traces of the kinds {' and '.join(kinds)}; say which with --from={kinds[0]}")
    if not found:
        wanted = "" if kind == "auto" else f" of kind {kind}"
        looked = f"; these files are not traces: {shown_names(passed)}" if passed else ""
        raise InvalidCapture(
            f"{source}: has no trace{wanted} in it{looked}" + "".join(f"; {each}" for each in problems)
        )
    for each in found:
        _ask(each)
    _number(found)
    return RankTraces(source, kinds[0], found, passed, problems)


def _files(source: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Possible traces, as (file, member, name), and what is wrong with the archive."""
    if os.path.isdir(source):
        files = [(each, "", os.path.relpath(each, source)) for each in _beneath(source)]
        if not files:
            raise InvalidCapture(f"{source}: the directory has no trace in it: expected files such as rank_0.json")
        return files, []
    regular_length(source)
    try:
        packed = is_archive(source)
    except OSError as error:
        raise CaptureNotFound(f"{source}: {error.strerror}; expected a trace file") from error
    if not packed:
        return [(source, "", os.path.basename(source))], []
    names, damage = archive_names(source)
    wanted = [name for name in names if is_json(name)]
    if not wanted and not damage:
        raise InvalidCapture(f"{source}: the archive has no trace in it; it has {shown_names(names)}")
    if len(wanted) > _MOST_FILES:
        raise InvalidCapture(f"{source}: has {len(wanted)} JSON files; at most {_MOST_FILES} are inspected")
    problems = [f"traces of other ranks may be missing: {damage}"] if damage else []
    return [(source, name, name) for name in wanted], problems


def _beneath(folder: str) -> Iterator[str]:
    """The regular files of a directory and of those in it that are named like traces, in order. Links to directories
    are not followed."""
    count = 0

    def fail(error: OSError) -> None:
        raise CaptureNotFound(f"{error.filename}: {error.strerror}; expected a directory of traces")

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            whole = os.path.join(parent, name)
            if (is_json(name) or name.endswith(_ARCHIVES)) and os.path.isfile(whole):
                count += 1
                if count > _MOST_FILES:
                    raise InvalidCapture(f"{folder}: has more than {_MOST_FILES} files that may be traces")
                yield whole


def _ask(each: _Candidate) -> None:
    """Set a trace's rank: from its content, else from its name."""
    each.rank, each.world_size = _SAID[each.kind](each)
    each.told = "as it says itself"
    if each.rank is None:
        *_others, last = [None, *_RANK.finditer(each.name)]
        each.rank = int(last[1]) if last and int(last[1]) < MOST_RANKS else None
        each.told = "by its name"


def _number(found: Sequence[_Candidate]) -> None:
    """If no trace has a rank: number them by the only number in which names differ, if these are 0, 1, 2, and so on."""
    if len(found) < 2 or any(each.rank is not None for each in found):
        return
    if len({_NUMBERS.sub("0", each.name) for each in found}) > 1:
        return
    columns = zip(*(_NUMBERS.findall(each.name) for each in found), strict=True)
    differing = [column for column in columns if len(set(column)) > 1]
    if len(differing) == 1 and sorted(differing[0], key=lambda each: (len(each), each)) == [
        *map(str, range(len(found)))
    ]:
        for each, number in zip(found, differing[0], strict=True):
            each.rank, each.told = int(number), "by the number in its name"


def _of_kineto(each: _Candidate) -> tuple[int | None, int]:
    with JsonStream.open(each.path, member=each.member) as stream:
        for key, value in stream.entries({"traceEvents"}):
            if key == "distributedInfo":
                return distributed(value)
            if key in ("traceEvents", ""):
                break
    return None, 1


def _of_execution_trace(each: _Candidate) -> tuple[int | None, int]:
    world_size = 1
    with JsonStream.open(each.path, member=each.member) as stream:
        for key, value in stream.entries({"nodes"}):
            if key != "nodes" or not isinstance(value, dict) or value.get("name") not in ("record_param_comms", GROUPS):
                continue
            try:
                node = node_of(value)
            except ValueError:
                continue  # the import reports what is wrong with it
            world_size = max(world_size, world_said(groups_listed(node)))
            rank = rank_said(node)
            if rank is not None:
                return rank, world_size
    return None, world_size


_SAID: dict[str, Any] = {"kineto": _of_kineto, "execution-trace": _of_execution_trace}


def _several(rank: int, found: Sequence[_Candidate]) -> str:
    return (
        f"has {len(found)} traces of rank {rank}: {shown_names([each.name for each in found])}; move the "
        f"unwanted ones elsewhere, or import each alone"
    )


def _spans(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as (first, last) of each stretch."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return spans


def _shown_ranks(spans: Sequence[tuple[int, int]]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    several = len(spans) > 1 or spans[0][0] < spans[0][1]
    shown = [f"{low}-{high}" if high > low else str(low) for low, high in spans]
    return f"rank{'s' if several else ''} {shown_names(shown)}"


def import_trace(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    kind: TraceKind | Literal["auto"] = "auto",
    level: Level = "auto",
    unique: bool = False,
    rewrite: Rewrite = "none",
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    on_record: Callable[[int, int], None] | None = None,
    graph_captures: Sequence[str | PathLike[str]] = (),
    rank: int | None = None,
    steps: Sequence[int] = (),
    scopes: Sequence[str] = (),
    time: str = "",
    inductor_cache: str | PathLike[str] | None = None,
) -> ImportReport:
    """Make the capture `out` of another tool's trace, and report what in it is exact, inferred or missing.

    `kind` says what made the trace; `auto` detects it from the file. `level` chooses the operators that represent the
    work, `unique` keeps one of each call with its count (profiler traces), `rewrite="portable"` replaces operators that
    only the traced device has with operators that every device has. `libraries` says which operator libraries may be
    imported, `names` which operators traced names mean, and what replaces strings that the trace dropped.
    `graph_captures` are profiler traces of the captures of the graphs that this one launches: their operators get the
    graphs' kernels. `steps` (of the profiler), `scopes` (annotations by name) and `time` (A:B in milliseconds) select
    what is imported of a profiler trace. `inductor_cache` is a directory of Inductor's with the sources of the trace's
    Triton kernels, which then can be replayed. `progress(bytes read, bytes)` and `on_record(records written, records)`
    report progress. `rank` chooses one of several ranks' traces in an archive or directory, and `{rank}` in `out` is
    replaced with its number; without it, an archive's first trace is imported.

    Raises CaptureNotFound and InvalidCapture for a trace that cannot be read at all, UsageError for options that its
    kind does not have and for missing ranks, OutputExists and CaptureFailed if `out` cannot be written.
    """
    options = _options(
        level=level,
        unique=unique,
        rewrite=rewrite,
        libraries=libraries,
        names=names,
        progress=progress,
        on_record=on_record,
        graph_captures=graph_captures,
        steps=steps,
        scopes=scopes,
        time=time,
        inductor_cache=inductor_cache,
    )
    choice_of("kind", kind, ("auto", *KINDS))
    path, out, force = path_of("path", path), path_of("out", out), flag_of("force", force)
    if rank is not None:
        count_of("rank", rank, 0, MOST_RANKS - 1)
    if rank is None:
        _check_out(path, out, force)  # before reading a large trace in vain
        found: TraceKind = sniff(path) if kind == "auto" else kind
        report = _import(path, out, found, options, force, None)
    else:
        out = _name(out, rank)
        _check_out(path, out, force)
        traces = rank_traces(path, kind)
        place = traces.of(rank)
        _check_out(place.path, out, force)
        report = _import_rank(traces, place, out, options, force)
    report.unused = options.names.unused()
    return report


def _options(
    *,
    level: Level,
    unique: bool,
    rewrite: Rewrite,
    libraries: OpLibraries | None,
    names: TracedNames | None,
    progress: Progress | None,
    on_record: Callable[[int, int], None] | None,
    graph_captures: Sequence[str | PathLike[str]],
    steps: Sequence[int],
    scopes: Sequence[str],
    time: str,
    inductor_cache: str | PathLike[str] | None,
) -> ImportOptions:
    """The options of an import, as the user gave them. Raises UsageError."""
    numbers = tuple(count_of("steps", each, 0, 1 << 62) for each in items_of("steps", steps, "a list of numbers"))
    wanted = TraceRange(numbers, texts_of("scopes", scopes), text_of("time", time))
    if wanted.time:
        parse_time(wanted.time)
    return ImportOptions(
        level,
        flag_of("unique", unique),
        rewrite,
        OpLibraries() if libraries is None else libraries,
        TracedNames() if names is None else names,
        progress,
        on_record,
        paths_of("graph_captures", graph_captures),
        wanted,
        None if inductor_cache is None else InductorCache(path_of("inductor_cache", inductor_cache)),
    )


def import_ranks(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str,
    *,
    kind: TraceKind | Literal["auto"] = "auto",
    level: Level = "auto",
    unique: bool = False,
    rewrite: Rewrite = "none",
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    on_record: Callable[[int, int], None] | None = None,
    steps: Sequence[int] = (),
    scopes: Sequence[str] = (),
    time: str = "",
    inductor_cache: str | PathLike[str] | None = None,
) -> dict[int, ImportReport]:
    """Make one capture for each rank whose trace is in an archive or a directory, or is one of several files, and
    report on each, by rank.

    `out` is a folder (it exists, or ends with a slash), which becomes like that of a capture under torchrun, with
    collectives that all ranks replay together; or it has `{rank}` in it, which is replaced with each rank's number.
    Either all captures are written or none: they are created beside their final paths and renamed when the last one is
    complete. Otherwise as import_trace.
    """
    options = _options(
        level=level,
        unique=unique,
        rewrite=rewrite,
        libraries=libraries,
        names=names,
        progress=progress,
        on_record=on_record,
        graph_captures=(),
        steps=steps,
        scopes=scopes,
        time=time,
        inductor_cache=inductor_cache,
    )
    choice_of("kind", kind, ("auto", *KINDS))
    paths = paths_of("path", path) if isinstance(path, list | tuple) else [path_of("path", path)]
    out, force = path_of("out", out), flag_of("force", force)
    folder = out if is_folder(out) else ""
    if folder and unique:
        raise UsageError(f"{out}: all ranks replay every collective together: import it without --unique")
    if folder:
        out, options = os.path.join(folder, RANK_FILE), replace(options, together=True)
    if "{rank}" not in out:
        raise UsageError(
            f"{out}: all ranks would be written to one file; put {{rank}} into the name, for instance "
            "step.{rank}.opreplay"
        )
    traces = rank_traces(paths, kind)
    places = {place: _name(out, place.rank) for place in traces.all(whole=bool(folder))}
    reports = {}
    with ExitStack() as staged:
        if folder and not os.path.isdir(folder):
            try:
                os.mkdir(folder)
            except OSError as error:
                raise CaptureFailed(f"{folder}: cannot be made: {error.strerror}") from None
            staged.callback(_remove_empty, folder)
        for each in places.values():
            for source in {os.path.realpath(place.path) for place in places}:
                _check_out(source, each, force)
        made = {}
        for place, final in places.items():
            try:
                staging = TemporaryDirectory(prefix=f".{PRODUCER}-", dir=os.path.dirname(final) or ".")
            except OSError as error:
                raise CaptureFailed(f"{final}: cannot be written: {error.strerror}") from None
            made[place] = os.path.join(staged.enter_context(staging), os.path.basename(final))
            reports[place.rank] = _import_rank(traces, place, made[place], options, False)
        for final in places.values():
            check_place(final, force)
        for place, final in places.items():
            try:
                os.replace(made[place], final)
            except OSError as error:
                raise CaptureFailed(f"{final}: is complete, but could not be renamed: {error.strerror}") from None
    for report in reports.values():
        report.unused = options.names.unused()
    if folder:
        next(iter(reports.values())).problems += write_manifest(folder)["problems"]
    return reports


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)


def _name(out: str | PathLike[str], rank: int) -> str:
    return fspath(out).replace("{rank}", str(rank))


def _check_out(path: str | PathLike[str], out: str | PathLike[str], force: bool) -> None:
    if same_file(path, out):
        raise UsageError(f"{fspath(out)}: the capture would take the trace's place; name another file")
    check_place(out, force)


def _import_rank(
    traces: RankTraces, place: RankTrace, out: str | PathLike[str], options: ImportOptions, force: bool
) -> ImportReport:
    try:
        report = _import(place.path, out, traces.kind, options, force, place)
    except OpReplayError as error:
        error.args = (f"rank {place.rank} ({place.name}): {error.args[0]}", *error.args[1:])
        raise
    report.rank = place.rank
    report.notes.append(f"{place.name} is the trace of rank {place.rank}, {place.told}")
    if traces.passed_over:
        report.notes.append(f"these files are not traces: {shown_names(traces.passed_over)}")
    report.problems += traces.problems
    return report


@collector_paused()
@dynamo_unneeded()
def _import(
    path: str | PathLike[str],
    out: str | PathLike[str],
    kind: TraceKind,
    options: ImportOptions,
    force: bool,
    place: RankTrace | None,
) -> ImportReport:
    if kind == "kineto":
        from .kineto.importer import import_kineto

        with _foreign_named(path, "" if place is None else place.member):
            return import_kineto(path, out, options, force=force, place=place)
    if options.unique or options.graph_captures or options.wanted:
        flag = (
            "--unique" if options.unique else "--graph-capture" if options.graph_captures else "--step, --scope, --time"
        )
        raise UsageError(f"{flag} is for profiler traces; {fspath(path)} is of kind {kind}")
    if kind == "execution-trace":
        from .execution_trace.importer import import_execution_trace

        return import_execution_trace(path, out, options, force=force, place=place)
    from .tracelens import import_tracelens

    cache = options.inductor.folder if options.inductor is not None else ""
    given = (("level", options.level, "auto"), ("rewrite", options.rewrite, "none"), ("inductor-cache", cache, ""))
    for flag, value, default in given:
        if value != default:
            raise UsageError(
                f"--{flag}={value} is for traces; {fspath(path)} is TraceLens IR, which lists single calls"
            )
    return import_tracelens(path, out, options, force=force)
