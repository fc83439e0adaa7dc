"""Checking a whole capture: `check_capture` verifies all of it and says what is in it, or raises the first finding."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from replayfmt.errors import InvalidCapture

from ..codes import MINOR_VERSION, FrameKind, RecordKind
from ..container.contents import Contents, find_contents, read_preamble, read_session
from ..container.frame_scan import scan_frames
from ..container.frames import parse_trailer
from ..container.index import read_index
from ..container.source import Source
from ..model import Session
from .verify import Progress, Verifier


@dataclass
class CheckReport:
    """What a check found. Filled as the check continues, so that it says something where the check ends early too."""

    path: str
    length: int = 0
    version: tuple[int, int] = (0, 0)
    session: Session | None = None
    complete: bool = False
    recovered: bool = False
    frames: dict[str, int] = field(default_factory=dict)
    records: dict[RecordKind, int] = field(default_factory=dict)
    definitions: dict[str, int] = field(default_factory=dict)
    storages: int = 0
    payloads: int = 0
    payload_bytes: int = 0
    annotated: int = 0
    warnings: list[str] = field(default_factory=list)


def _no_progress(_count: int) -> None:
    return None


def check_capture(
    path: str | os.PathLike[str], report: CheckReport | None = None, progress: Progress = _no_progress
) -> CheckReport:
    """Verify everything in a capture. Raises InvalidCapture with the first thing that is wrong, which includes that it
    was never closed; CaptureNotFound where it cannot be read.

    `progress` is called with numbers of bytes, which add up to about the file's length.
    """
    source = Source(path)
    report = report or CheckReport(source.path)
    try:
        _Check(source, report, progress).run()
    finally:
        source.close()
    return report


class _Check:
    def __init__(self, source: Source, report: CheckReport, progress: Progress) -> None:
        self._source = source
        self._report = report
        self._progress = progress

    def run(self) -> None:
        source, report = self._source, self._report
        report.length = source.length
        preamble = read_preamble(source)
        report.version = (preamble.major, preamble.minor)
        contents = find_contents(source)
        report.complete = contents.complete
        report.warnings = list(contents.warnings)
        if preamble.minor > MINOR_VERSION:
            report.warnings.append(
                f"format version {preamble.major}.{preamble.minor} is newer than this tool's "
                f"{preamble.major}.{MINOR_VERSION}; its new parts were not checked"
            )
        for kind in contents.frames["kind"].tolist():
            name = FrameKind(kind).name if kind in FrameKind._value2member_map_ else f"kind {kind}"
            report.frames[name] = report.frames.get(name, 0) + 1
        report.session = read_session(source, contents, preamble)
        self._verify_frames(contents)
        if not contents.complete:
            raise InvalidCapture(
                f"{source.path}: {contents.incomplete_reason}; "
                f"opreplay-check {source.path} --recover OUT writes them to a valid capture"
            )
        if contents.index_problem:
            raise InvalidCapture(
                f"{contents.index_problem}; every frame before it is whole, and "
                f"opreplay-check {source.path} --recover OUT writes a valid capture"
            )
        self._compare_index(contents)

    def _verify_frames(self, contents: Contents) -> None:
        report = self._report
        verifier = Verifier(self._source, contents, self._progress)
        report.definitions = {name: count for name, count in verifier.definitions.counts.items() if count}
        try:
            for position in range(len(contents.frames)):
                verifier.verify(position)
        finally:
            report.storages = verifier.tally.storages
            report.payloads, report.payload_bytes = verifier.payloads, verifier.payload_bytes
            report.annotated = verifier.tally.annotated
            report.records = verifier.tally.summary(verifier.definitions, 0).records
        verifier.verify_definitions()
        report.recovered = verifier.summary is not None and verifier.summary.recovered

    def _compare_index(self, contents: Contents) -> None:
        """The index lists what walking the file finds."""
        source = self._source
        trailer = parse_trailer(source.read(source.length - 64, 64, "trailer"), source.length, source.path)
        frames, payloads = read_index(source, trailer)
        scanned = scan_frames(source, trailer)
        if scanned.stopped:
            raise InvalidCapture(f"{source.path}: {scanned.stopped}")
        if (frames.tobytes(), payloads.tobytes()) != (scanned.frames.tobytes(), scanned.payloads.tobytes()):
            raise InvalidCapture(
                f"{source.where(trailer.index_offset)}: the index differs from the frames and payloads it lists"
            )
