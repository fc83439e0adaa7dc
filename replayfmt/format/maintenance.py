"""Operations on whole captures: verify every frame, report on it, recover a damaged one, add digests of external files.

Recovery makes a valid capture from one that was never closed, or is damaged from some frame on. Both it and adding
digests write a new file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from replayfmt.errors import ExternalFileProblem, InvalidCapture, UnsupportedVersion, UsageError

from .codes import MINOR_VERSION, FileValidation, FrameKind, RecordKind
from .contents import (
    Contents,
    Tally,
    bound_definitions,
    decode_summary,
    find_contents,
    read_frame,
    read_index,
    read_preamble,
    read_session,
    walk_contents,
)
from .definition_families import SCOPES
from .definition_tables import COLUMNS, Definitions, DefinitionTables, encode_all, encode_tables
from .external_files import CHUNK_BYTES, FileRemaps, OpenedFile, missing
from .frame_output import Buffer, FrameOutput
from .frames import FLAG_CONSOLIDATED, HEADER_BYTES, PAYLOAD_ROW, FrameHeader, align, body_hash, parse_trailer
from .model import CaptureInfo, ExternalFile, Summary
from .output import Output, same_file
from .reader import CaptureReader
from .record_frames import RecordFrame, RecordFrameDecoder, first_and_storages
from .signature_layout import members
from .source import PayloadInput, Source

_IS_DIGEST = members({RecordKind.digest}, RecordKind)
_IS_SCOPE = members({RecordKind.scope_begin, RecordKind.scope_end}, RecordKind)
Progress = Callable[[int], None]


class Verifier:
    """Verifies the frames of a capture one after the other, from the first."""

    def __init__(self, source: Source, contents: Contents, progress: Progress) -> None:
        """`progress` is called with numbers of bytes that were read since it was called last."""
        self._source = source
        self._frames = contents.frames
        self._progress = progress
        self._payloads = PayloadInput(source, contents.payloads)
        self._lengths = PayloadLengths(contents)
        self._definitions, self._counts = self._read_definitions()
        self.definitions = DefinitionTables(self._definitions, source.path)
        self._decoder = RecordFrameDecoder(self.definitions)
        self.tally = Tally()
        self.payload_bytes = 0
        self.payloads = 0
        self.summary: Summary | None = None  # the stored one, once it was verified
        self._kind_of = self.definitions.column("signature_kind")
        # The frame of records before: its first ordinal and signatures.
        self._before: tuple[int, np.ndarray] = (0, np.zeros(0, np.uint32))

    def _read_definitions(self) -> tuple[Definitions, list[dict[str, int]]]:
        """All definitions, and how many of each family there are before each frame."""
        definitions = Definitions()
        counts = []
        for position, row in enumerate(self._frames):
            counts.append(definitions.counts)
            if row["kind"] == FrameKind.tables and not row["flags"] & FLAG_CONSOLIDATED:
                header, body, where = read_frame(self._source, self._frames, position)
                definitions.add(body, header.minor, where, self._lengths.before(position))
        return definitions, counts

    def verify_definitions(self) -> None:
        """A scope is a path: the same name under the same parent has one id."""
        if SCOPES.repeats(self.definitions.column):
            raise InvalidCapture(f"{self._source.path}: two scopes have the same name and parent")

    def verify(self, position: int) -> FrameHeader:
        """Verify the next frame. Raises InvalidCapture with what is wrong with it."""
        header, body, where = read_frame(self._source, self._frames, position)
        if header.kind == FrameKind.payload:
            self._verify_payloads(header)
        elif header.kind == FrameKind.records:
            self._verify_records(position, header, body, where)
        elif header.kind == FrameKind.tables and header.consolidated:
            self._verify_consolidated(position, header, body, where)
        elif header.kind == FrameKind.summary:
            self._verify_summary(header, body, where)
        if header.kind != FrameKind.payload:
            self._progress(len(body))
        return header

    def _verify_payloads(self, header: FrameHeader) -> None:
        for number in range(self.payloads + 1, self.payloads + header.count + 1):
            self._payloads.verify(number)
            info = self._payloads.info(number)
            self.payload_bytes += info.raw_bytes
            self._progress(info.stored_bytes)
        self.payloads += header.count

    def _verify_records(self, position: int, header: FrameHeader, body: bytes, where: str) -> None:
        counts = {**self._counts[position], "payload": self.payloads}
        frame = self._decoder.decode(body, header, int(self._frames["offset"][position]), where, counts)
        if frame.first_storage != self.tally.storages + 1:
            raise InvalidCapture(f"{where}: first_storage is {frame.first_storage}, expected {self.tally.storages + 1}")
        if len(frame.tensor_id) > 1:
            rows = np.zeros(len(frame.tensor_id), np.dtype([("a", "<u8"), ("b", "<i8"), ("c", "<u4")]))
            rows["a"], rows["b"], rows["c"] = frame.tensor_storage, frame.tensor_offset, frame.tensor_meta
            if len(np.unique(rows)) != len(rows):
                raise InvalidCapture(f"{where}: the same storage, offset and metadata have two tensor ids")
        self._verify_digests(frame, where)
        self._verify_scopes(frame, where)
        if frame.annotation is not None:
            for number in np.unique(frame.annotation).tolist():
                self.definitions.annotation(number)
        self._before = (frame.first_ordinal, frame.signature)
        self.tally.add_frame(frame)

    def _rows_of(self, frame: RecordFrame, wanted: np.ndarray) -> np.ndarray:
        return np.flatnonzero(wanted[self._kind_of[frame.signature.astype(np.int64) - 1]])

    def _verify_digests(self, frame: RecordFrame, where: str) -> None:
        """`of` is an op that came before and `result` one of its results, or -1 for something it wrote; or of a live
        tensor both are -1."""
        rows = self._rows_of(frame, _IS_DIGEST)
        if not len(rows):
            return
        of, result = frame.ints[frame.int_first[rows]], frame.ints[frame.int_first[rows] + 1]
        if (
            (of < -1).any()
            or (result < -1).any()
            or ((of == -1) & (result != -1)).any()
            or (of >= frame.first_ordinal + rows).any()
        ):
            raise InvalidCapture(f"{where}: a digest is of a record that does not come before it")
        # An op's digests follow it at once. One that names an op further back than the frame before is not followed:
        # reading frames again and again is what a hostile file would ask for.
        first, before = self._before
        near = of >= first
        of, result = of[near], result[near]
        signatures = np.concatenate((before, frame.signature))[of - first].astype(np.int64) - 1
        results = self.definitions.column("signature_results")[signatures]
        wrong = (self._kind_of[signatures] != RecordKind.op) | (result >= results)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvalidCapture(
                f"{where}: a digest is of result {int(result[at])} of record {int(of[at])}, which has no such result"
            )

    def _verify_scopes(self, frame: RecordFrame, where: str) -> None:
        """A scope marker's record is in the scope it names."""
        rows = self._rows_of(frame, _IS_SCOPE)
        if not len(rows):
            return
        scopes = frame.scope[rows].astype(np.int64)
        named = self.definitions.column("node_constant")[
            self.definitions.first_nodes[frame.signature[rows].astype(np.int64) - 1]
        ]
        names = np.concatenate(([0], self.definitions.column("scope_name")))
        if (scopes == 0).any() or (names[scopes] != named).any():
            raise InvalidCapture(f"{where}: a scope marker names another scope than its record's")

    def _verify_consolidated(self, position: int, header: FrameHeader, body: bytes, where: str) -> None:
        consolidated = Definitions()
        consolidated.add(body, header.minor, where, self._lengths.before(position))
        if self._counts[position] != self._definitions.counts or not consolidated.consolidates(self._definitions):
            raise InvalidCapture(f"{where}: the consolidated definitions differ from those of the frames before it")

    def _verify_summary(self, header: FrameHeader, body: bytes, where: str) -> None:
        stored = decode_summary(body, len(self.definitions.kernels) - 1, header.first_ordinal, where)
        counted = self.tally.summary(self.definitions, self.payload_bytes, stored.ended_ns, stored.recovered)
        if stored != counted:
            fields = [name for name in vars(stored) if getattr(stored, name) != getattr(counted, name)]
            raise InvalidCapture(
                f"{where}: the summary is wrong: {', '.join(fields)}: stored "
                f"{[getattr(stored, name) for name in fields]}, counted "
                f"{[getattr(counted, name) for name in fields]}"
            )
        self.summary = stored


class PayloadLengths:
    def __init__(self, contents: Contents) -> None:
        frames = contents.frames
        self._lengths = contents.payloads["raw_bytes"]
        self._after = np.cumsum(np.where(frames["kind"] == FrameKind.payload, frames["count"], 0), dtype=np.int64)

    def before(self, position: int) -> np.ndarray:
        """Those of the payloads before a frame, in order of their ids."""
        return self._lengths[: int(self._after[position - 1]) if position else 0]


def kept(contents: Contents, whole: int) -> Contents:
    """The first `whole` frames of a capture, up to the definitions and totals that close it."""
    frames = contents.frames[:whole]
    closing = np.flatnonzero((frames["kind"] == FrameKind.summary) | ((frames["flags"] & FLAG_CONSOLIDATED) != 0))
    frames = frames[: int(closing[0])] if len(closing) else frames
    payloads = int(frames["count"][frames["kind"] == FrameKind.payload].sum(dtype=np.int64))
    records = int(frames["count"][frames["kind"] == FrameKind.records].sum(dtype=np.int64))
    end = contents.end if len(frames) == len(contents.frames) else int(contents.frames["offset"][len(frames)])
    return replace(contents, frames=frames, payloads=contents.payloads[:payloads], records=records, end=end)


@dataclass
class CheckReport:
    """What a check found. Filled as the check continues, so that it says something where the check ends early too."""

    path: str
    length: int = 0
    version: tuple[int, int] = (0, 0)
    session: CaptureInfo | None = None
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


def check_capture(
    path: str | os.PathLike[str], report: CheckReport | None = None, progress: Progress = lambda count: None
) -> CheckReport:
    """Verify everything in a capture. Raises InvalidCapture with the first thing that is wrong, which includes that it
    was never closed; CaptureNotFound where it cannot be read.

    `progress` is called with numbers of bytes, which add up to about the file's length.
    """
    source = Source(path)
    report = report or CheckReport(source.path)
    try:
        _check(source, report, progress)
    finally:
        source.close()
    return report


def _check(source: Source, report: CheckReport, progress: Progress) -> None:
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
    _verify_frames(source, contents, report, progress)
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
    trailer = parse_trailer(source.read(source.length - 64, 64, "trailer"), source.length, source.path)
    frames, payloads = read_index(source, trailer)
    walked = walk_contents(source, trailer, "")
    if not walked.complete:
        raise InvalidCapture(f"{source.path}: {walked.incomplete_reason}")
    if (frames.tobytes(), payloads.tobytes()) != (walked.frames.tobytes(), walked.payloads.tobytes()):
        raise InvalidCapture(
            f"{source.where(trailer.index_offset)}: the index differs from the frames and payloads it lists"
        )


def _verify_frames(source: Source, contents: Contents, report: CheckReport, progress: Progress) -> None:
    verifier = Verifier(source, contents, progress)
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


_COPY_BYTES = 4 << 20


def recover_capture(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress = lambda count: None,
) -> tuple[CheckReport, str]:
    """Write what is whole in `path` to `out`, verified. Returns the check's report on `out`, and a sentence about what
    was left behind ("" for nothing). Raises InvalidCapture if nothing is whole, OutputExists, CaptureFailed.

    `progress` is called with numbers of bytes, which add up to about three times the file's length.
    """
    source = Source(path)
    try:
        if same_file(path, out):
            raise UsageError(f"{source.path}: cannot be recovered onto itself; name another file")
        preamble = read_preamble(source)
        with Output(out, force, doing="recovering") as output:
            contents = walk_contents(source, None, "")
            bound_definitions(source, contents)
            read_session(source, contents, preamble)
            whole, verifier, left = _whole(source, contents, progress)
            for start in range(0, whole.end, _COPY_BYTES):
                count = min(_COPY_BYTES, whole.end - start)
                output.write([source.read(start, count, "frames")])
                progress(count)
            definitions = Verifier(source, whole, progress).definitions
            ended_ns = verifier.summary.ended_ns if verifier.summary else None  # where it got as far as writing it down
            payload_bytes = PayloadInput(source, whole.payloads).raw_bytes
            summary = verifier.tally.summary(definitions, payload_bytes, ended_ns, recovered=True)
            frames = FrameOutput(output, min(preamble.minor, MINOR_VERSION))
            frames.adopt(whole.frames.tobytes(), whole.records, verifier.tally.storages + 1)
            tables = encode_all(definitions.strings[1:], {name: definitions.column(name) for name in COLUMNS})
            frames.finish(tables, summary, whole.payloads.tobytes())
            return check_capture(output.partial, CheckReport(output.path), progress), left
    finally:
        source.close()


def _whole(source: Source, contents: Contents, progress: Progress) -> tuple[Contents, Verifier, str]:
    """The contents before the first frame that is not whole, who verified them, and what is wrong from there on."""
    contents, left = _defined(source, contents)
    verifier = Verifier(source, contents, progress)
    position = 0
    try:
        for position in range(len(contents.frames)):
            verifier.verify(position)
        position = len(contents.frames)
    except UnsupportedVersion:
        raise
    except InvalidCapture as error:
        left = str(error)
    return kept(contents, position), verifier, left


def _defined(source: Source, contents: Contents) -> tuple[Contents, str]:
    """The contents before the first definitions that cannot be used."""
    definitions, lengths = Definitions(), PayloadLengths(contents)
    for position in contents.of_kind(FrameKind.tables).tolist():
        try:
            header, body, where = read_frame(source, contents.frames, position)
            if not header.consolidated:
                definitions.add(body, header.minor, where, lengths.before(position))
        except UnsupportedVersion:
            raise
        except InvalidCapture as error:
            return kept(contents, position), str(error)
    return contents, contents.incomplete_reason


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
        with Output(out, force, doing="adding-digests") as output:
            outside = sum(file.bytes for file in {file.path: file for file in files}.values() if not file.payload)
            started(3 * reader.length + outside)
            check_capture(path, None, progress)
            _Copy(reader, _digests(reader, files, remaps, progress), output, progress).run()
            report = check_capture(output.partial, CheckReport(output.path), progress)
    confirmed = sum(file.digest is not None for file in files)
    return DigestsAdded(len(files) - confirmed, confirmed, report)


def _digests(reader: CaptureReader, files: list[ExternalFile], remaps: FileRemaps, progress: Progress) -> list[str]:
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
        self._reader = reader
        self._digests = np.array([[int(digest[16:], 16), int(digest[:16], 16)] for digest in digests], np.uint64)
        self._output = output
        self._progress = progress
        self._definitions = Definitions()  # those copied so far
        self._lengths = PayloadLengths(reader.contents)
        self._frames = FrameOutput(output, reader.version[1])
        self._payload_rows = bytearray()

    def run(self) -> None:
        self._output.write([self._reader.source.read(0, HEADER_BYTES, "preamble")])
        for position in range(len(self._reader.contents.frames)):
            self._copy(position)
        self._frames.end(bytes(self._payload_rows))

    def _copy(self, position: int) -> None:
        header, body, where = self._reader.read_frame(position)
        if header.kind == FrameKind.payload:
            self._copy_payloads(int(self._reader.contents.frames["offset"][position]), header, body)
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
            self._output.write([self._reader.source.read(offset + HEADER_BYTES + start, count, "payloads")])
            self._progress(count)
        self._payload_rows += packed
