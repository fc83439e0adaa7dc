"""Adds digests of a capture's external files, so that copies of them are recognized anywhere.

The capture is copied frame by frame: records and payloads as they are, definitions with digests in the rows of files.
What must be true of the original is checked before anything is copied, and the copy before it gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from replayfmt.errors import ExternalFileProblem, UnsupportedVersion, UsageError

from ..codes import MINOR_VERSION, FileValidation, FrameKind
from ..container.contents import Contents, find_contents, read_frame, read_preamble
from ..container.frame_output import Buffer, FrameOutput
from ..container.frames import HEADER_BYTES, PAYLOAD_ROW, FrameHeader, align, body_hash
from ..container.output import Output, same_file
from ..container.source import Source
from ..definitions.reading import Definitions
from ..definitions.tables import encode_tables
from ..external.file_digest import CHUNK_BYTES
from ..external.file_remap import FileRemaps
from ..external.files import OpenedFile, missing
from ..model import ExternalFile
from ..reader import CaptureReader
from ..records.record_frames import first_and_storages
from .check import CheckReport, check_capture
from .verify import PayloadLengths, Progress

_COPY_BYTES = 4 << 20
_HALF = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class DigestsAdded:
    """What became of a capture's files: how many got a digest, how many had one, and the check's report on the copy."""

    added: int
    confirmed: int
    report: CheckReport


def add_digests(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    remaps: FileRemaps | None = None,
    force: bool = False,
    started: Callable[[int], None] = lambda total: None,
    progress: Progress = lambda count: None,
) -> DigestsAdded:
    """Write a copy of the capture at `path` to `out` in which every external file has its digest.

    Each file must be the captured one: by its digest where the capture has that, else by its identity. Files whose
    whole content is in the capture are not looked for. `started` is called with about how many bytes `progress` will
    add up to. Raises ExternalFileProblem with everything that is wrong with the files, UsageError for a remap that
    matches nothing, OutputExists, InvalidCapture if the capture is not valid; nothing is left at `out` then.
    """
    remaps = remaps or FileRemaps()
    if same_file(path, out):
        raise UsageError(f"{os.fspath(path)}: cannot be rewritten onto itself; name another file")
    with CaptureReader(path) as reader:
        files = list(reader.files)[1:]
        remaps.check_used([file.path for file in files])
        if not files:
            raise ExternalFileProblem(
                f"{reader.path}: names no external file, so there are no digests to add; it can be copied as it is"
            )
        known = np.isin(reader.contents.frames["kind"], list(FrameKind)).all()
        if reader.version[1] > MINOR_VERSION or not known:
            raise UnsupportedVersion(
                f"{reader.path}: of format version {reader.version[0]}.{reader.version[1]}; this "
                f"tool can rewrite captures up to 1.{MINOR_VERSION}, and nothing it does not know"
            )
        output = Output(out, force, doing="adding-digests")
        try:
            outside = sum(file.bytes for file in {file.path: file for file in files}.values() if not file.payload)
            started(3 * reader.length + outside)
            check_capture(path, None, progress)
            digests = _digests(reader, files, remaps, progress)
            _Copy(reader, digests, output, progress).run()
            report = check_capture(output.partial, CheckReport(output.path), progress)
            output.finish()
        except BaseException:
            output.discard()
            raise
    confirmed = sum(file.digest is not None for file in files)
    return DigestsAdded(len(files) - confirmed, confirmed, report)


def _digests(reader: CaptureReader, files: list[ExternalFile], remaps: FileRemaps, progress: Progress) -> list[str]:
    """The digest of each file, in order of their ids."""
    found, problems = [], []
    for file in files:
        try:
            found.append(_embedded(reader, file) if file.payload else _digest(file, remaps, progress))
        except ExternalFileProblem as error:
            problems.append(str(error))
    if problems:
        raise ExternalFileProblem(f"{reader.path}: no digests were added: " + "; ".join(problems))
    return found


def _embedded(reader: CaptureReader, file: ExternalFile) -> str:
    content = memoryview(reader.payload(file.payload))
    chunks = (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
    digest = xxh3_128_hexdigest(b"".join(xxh3_128_digest(chunk) for chunk in chunks))
    if file.digest not in (None, digest):
        raise ExternalFileProblem(
            f"external file {file.path}: the content in the capture has the digest {digest}, the "
            f"capture says {file.digest}"
        )
    return digest


def _digest(file: ExternalFile, remaps: FileRemaps, progress: Progress) -> str:
    path = remaps.apply(file.path)
    remapped = path != file.path
    try:
        opened = OpenedFile(path)
    except ExternalFileProblem as error:
        raise ExternalFileProblem(missing(error, file, remapped)) from None
    with opened:
        problem = opened.problem(file, remapped, progress)
        if problem is not None:
            raise ExternalFileProblem(problem)
        return opened.digest(progress)


class _Copy:
    """Copies the frames of a valid capture, with other digests of its files."""

    def __init__(self, reader: CaptureReader, digests: list[str], output: Output, progress: Progress) -> None:
        self._source = Source(reader.path)
        self._digests = np.array([[int(digest[16:], 16), int(digest[:16], 16)] for digest in digests], np.uint64)
        self._output = output
        self._progress = progress
        self._definitions = Definitions()  # those copied so far
        self._payload_rows = bytearray()

    def run(self) -> None:
        source = self._source
        try:
            preamble = read_preamble(source)
            contents = find_contents(source)
            self._output.write([source.read(0, HEADER_BYTES, "preamble")])
            self._frames = FrameOutput(self._output, preamble.minor)
            self._lengths = PayloadLengths(contents)
            for position in range(len(contents.frames)):
                self._copy(contents, position)
            self._frames.end(bytes(self._payload_rows))
        finally:
            source.close()

    def _copy(self, contents: Contents, position: int) -> None:
        header, body, where = read_frame(self._source, contents.frames, position)
        if header.kind == FrameKind.payload:
            self._copy_payloads(int(contents.frames["offset"][position]), header, body)
        elif header.kind == FrameKind.tables:
            self._frames.write(
                FrameKind.tables,
                self._with_digests(body, header, where, self._lengths.before(position)),
                flags=header.flags,
            )
        elif header.kind == FrameKind.records:
            _first, storages = first_and_storages(body, where)
            self._frames.write(FrameKind.records, body, count=header.count, storages=storages)
        elif header.kind == FrameKind.summary:
            self._frames.write(FrameKind.summary, body)
        else:
            self._frames.write(FrameKind.head, body)
        if header.kind != FrameKind.payload:
            self._progress(header.stored_bytes)

    def _with_digests(self, body: bytes, header: FrameHeader, where: str, payload_bytes: np.ndarray) -> memoryview:
        """A Tables body with its files' digests."""
        definitions = Definitions() if header.consolidated else self._definitions
        read = definitions.add(body, header.minor, where, payload_bytes)
        columns = dict(read.columns)
        first = read.firsts["file"] - 1
        digests = self._digests[first : first + len(columns["file_path"])]
        columns["file_digest_low"], columns["file_digest_high"] = digests[:, 0].copy(), digests[:, 1].copy()
        columns["file_validation"] = columns["file_validation"] | np.uint8(FileValidation.digest)
        return encode_tables([text.encode() for text in read.strings], columns, read.firsts)

    def _copy_payloads(self, offset: int, header: FrameHeader, body: bytes) -> None:
        """A payload frame at its new place: its rows name where their content lies."""
        rows = np.frombuffer(body, PAYLOAD_ROW).copy()
        rows["offset"] += np.uint64(self._frames.position - offset)
        packed = rows.tobytes()
        begin = align(len(packed))
        parts: list[Buffer] = [packed, bytes(begin - len(packed))]
        end = align(header.stored_bytes)
        self._frames.write_payloads(header.stored_bytes, header.count, parts, body_hash(packed))
        for start in range(begin, end, _COPY_BYTES):
            count = min(_COPY_BYTES, end - start)
            self._output.write([self._source.read(offset + HEADER_BYTES + start, count, "payloads")])
            self._progress(count)
        self._payload_rows += packed
