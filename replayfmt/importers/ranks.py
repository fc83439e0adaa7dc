"""The traces of a distributed program's ranks in one archive or directory: which file belongs to which rank.

The rank is taken from the trace itself (a profiler trace's `distributedInfo`, an execution trace's collectives of all
ranks), else from its name (`rank_3.json`, `rank3/trace.json`), else from the only number in which the names differ, if
these are 0, 1, 2 and so on. Ranks are never guessed: a trace without a rank, or with another one's, is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Literal

from replayfmt.errors import CaptureNotFound, InvalidCapture, UsageError

from .common.json_stream import JsonStream
from .common.rank_trace import MOST_RANKS, RankTrace
from .common.trace_files import archive_names, is_archive, is_json, regular_length, shown_names
from .execution_trace.nodes import node_of, rank_said
from .kineto.importer import distributed
from .sniffing import TraceKind, sniff

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

    def all(self) -> list[RankTrace]:
        """The traces of all ranks, in order. Raises UsageError unless each has a different rank."""
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
        if absent:
            self.problems.append(f"of {world} ranks, the traces of {_shown_ranks(absent)} are not there")
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


def rank_traces(path: str | PathLike[str], kind: TraceKind | Literal["auto"] = "auto") -> RankTraces:
    """Search an archive, a directory (with subdirectories), or a single file. With `kind`, only for traces of that
    kind.

    Raises CaptureNotFound and InvalidCapture if there is no trace, UsageError if there are traces of several kinds and
    `kind` does not say which is meant.
    """
    source = fspath(path)
    files, problems = _files(source)
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
    with JsonStream.open(each.path, member=each.member) as stream:
        for key, value in stream.entries({"nodes"}):
            if key == "nodes" and isinstance(value, dict) and value.get("name") == "record_param_comms":
                try:
                    rank = rank_said(node_of(value))
                except ValueError:
                    continue  # the import reports what is wrong with it
                if rank is not None:
                    return rank, 1
    return None, 1


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
