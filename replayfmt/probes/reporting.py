"""A report: the files that a user names, evaluated, as text, JSON and a picture in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.output import check_place, make_folder, new_file

from . import pictures
from .costs import LAYOUTS, PredictedLaunch, evaluate_counts, evaluate_latency, evaluate_memory, evaluate_overhead
from .dmat import evaluate_dmat
from .pictures import pictures_of
from .recordings import AccessMap, ProbeRecording, ProbeSection, TensorAddresses, TraceFolder, read_tensors
from .schedule import Progress, evaluate_schedule, evaluate_warps, no_progress
from .tables import Evaluated, as_json, as_text


@dataclass(frozen=True)
class NamedFile:
    """A file or folder of a report. `label`: what the user called it, or None."""

    path: str
    label: str | None = None

    @classmethod
    def parse(cls, text: str) -> NamedFile:
        """`PATH`, or `LABEL=PATH`, where no path is meant: one that exists is a path, whatever is in its name."""
        label, equals, path = text.partition("=")
        if not equals or os.path.lexists(text):
            return cls(text)
        if not label or not path:
            raise UsageError(f"{text}: expected PATH or LABEL=PATH")
        return cls(path, label)


@dataclass(frozen=True)
class ReportOptions:
    """How to evaluate. `section`: whose records, from 0, where a recording holds those of several probes. `tensors`: a
    `tensor.trace` (None: that of the recording's run). `predictions`: launches whose probes' memory is to be
    predicted."""

    section: int = 0
    tensors: str | None = None
    predictions: tuple[PredictedLaunch, ...] = ()


@dataclass(frozen=True)
class ReportKind:
    """An evaluation as a report. `files`: how many it takes, at least and at most; `what`: which ones."""

    evaluate: Callable[[list[NamedFile], ReportOptions, Progress], Any]
    draw: Callable[[Any, Any], None]
    inches: tuple[float, float]
    files: tuple[int, int | None]
    what: str


def evaluate(
    kind: str, files: list[NamedFile], options: ReportOptions | None = None, progress: Progress = no_progress
) -> Evaluated:
    """Evaluate files. Raises UsageError for a kind that is unknown or takes other files, CaptureNotFound,
    InvalidRecording."""
    if kind not in KINDS:
        raise UsageError(f"{kind}: expected a kind of report, one of {', '.join(KINDS)}")
    chosen = KINDS[kind]
    least, most = chosen.files
    given = options or ReportOptions()
    for flag, value, of in (("--tensors", given.tensors, "dmat"), ("--predict", given.predictions, "memory")):
        if value and kind != of:
            raise UsageError(f"{flag} is an option of report {of}; report {kind} does not use it")
    if given.section and kind not in ("schedule", "dmat", "warps", *LAYOUTS):
        raise UsageError(f"--section chooses records of a recording; report {kind} has none")
    if len(files) < (0 if given.predictions else least) or (most is not None and len(files) > most):
        wanted = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} or {most}"
        raise UsageError(f"report {kind}: expected {wanted}: {chosen.what}; got {len(files)}")
    result: Evaluated = chosen.evaluate(files, given, progress)
    return result


def write_report(
    result: Evaluated, folder: str | os.PathLike[str], *, picture: bool = True, force: bool = False
) -> list[Path]:
    """Write a result into a folder, which is created, as `<kind>.txt`, `.json`, `.svg` and `.png`; the last two only
    with `picture`. Returns their paths. Nothing is written where one of them exists and `force` is not set.

    Raises OutputExists, CaptureFailed, LibraryMissing.
    """
    place = Path(folder)
    content = {
        "txt": "".join(f"{line}\n" for line in as_text(result)).encode("utf-8", "backslashreplace"),
        "json": json.dumps(as_json(result), indent=1, allow_nan=False).encode() + b"\n",
    }
    if picture:
        kind = KINDS[result.kind]
        content |= pictures_of(lambda figure: kind.draw(result, figure), *kind.inches)
    make_folder(place)
    paths = {ending: place / f"{result.kind}.{ending}" for ending in content}
    for path in paths.values():
        check_place(path, force)
    for ending, path in paths.items():
        with new_file(path, force) as file:
            file.write(content[ending])
    return list(paths.values())


def _one_recording(path: str) -> str:
    """The result file that a path names: itself, or that of the only launch in the folder of a run."""
    if not os.path.isdir(path):
        return path
    results = TraceFolder.open(path).results
    if len(results) != 1:
        names = ", ".join(each.name for each in results[:5]) + (", …" if len(results) > 5 else "")
        raise UsageError(f"{path}: has {len(results)} recordings in result/; name one{': ' if names else ''}{names}")
    return str(results[0])


def _section(file: NamedFile, options: ReportOptions) -> ProbeSection:
    return ProbeRecording.open(_one_recording(file.path)).section(options.section)


def _dmat(files: list[NamedFile], options: ReportOptions, progress: Progress) -> Evaluated:
    path = _one_recording(files[0].path)
    source = AccessMap.open(path) if path.endswith(".dmat") else ProbeRecording.open(path).section(options.section)
    return evaluate_dmat(source, _tensors(path, options), progress)


def _tensors(path: str, options: ReportOptions) -> list[TensorAddresses] | None:
    """The list of tensors that the user names, else that of the run whose `result/` the recording is in."""
    beside = Path(path).resolve().parent.parent / "tensor.trace"
    if options.tensors is None and not (beside.parent / "result" == Path(path).resolve().parent and beside.is_file()):
        return None
    return read_tensors(options.tensors if options.tensors is not None else beside)


def _warps(files: list[NamedFile], options: ReportOptions, progress: Progress) -> Evaluated:
    names = ("exclusive", "shared") if len(files) == 2 else ("recording",)
    return evaluate_warps(
        [(file.label or name, _section(file, options)) for file, name in zip(files, names, strict=True)], progress
    )


def _labelled(files: list[NamedFile]) -> list[tuple[str | None, str]]:
    return [(file.label, file.path) for file in files]


def _counts(kind: str) -> ReportKind:
    return ReportKind(
        lambda files, options, progress: evaluate_counts(kind, _section(files[0], options), progress),
        pictures.draw_counts,
        (10, 6),
        (1, 1),
        f"a recording of {kind}, or the folder of a run with one",
    )


KINDS: dict[str, ReportKind] = {
    "schedule": ReportKind(
        lambda files, options, progress: evaluate_schedule(_section(files[0], options), progress),
        pictures.draw_schedule,
        (10, 8.5),
        (1, 1),
        "a recording of block_sched, or the folder of a run with one",
    ),
    "dmat": ReportKind(
        _dmat,
        pictures.draw_dmat,
        (10, 8.5),
        (1, 1),
        "a .dmat file, a recording of dmat, or the folder of a run with one",
    ),
    "overhead": ReportKind(
        lambda files, _options, _progress: evaluate_overhead(_labelled(files)),
        pictures.draw_overhead,
        (10, 6),
        (1, None),
        "folders of runs, or logs, as PROBE=PATH",
    ),
    "memory": ReportKind(
        lambda files, options, _progress: evaluate_memory(_labelled(files), options.predictions),
        pictures.draw_memory,
        (10, 6),
        (1, None),
        "folders of runs, as MODEL/TEST=DIR, or --predict",
    ),
    "latency": ReportKind(
        lambda files, _options, _progress: evaluate_latency(files[0].path),
        pictures.draw_latency,
        (10, 6),
        (1, 1),
        "a CSV file",
    ),
    "warps": ReportKind(
        _warps, pictures.draw_warps, (10, 7.5), (1, 2), "a recording of block_sched, or two to compare, as NAME=PATH"
    ),
    **{kind: _counts(kind) for kind in LAYOUTS},
}
