"""Recovery: makes a valid capture from one that was never closed, or is damaged from some frame on.

The file is walked and verified frame by frame; what comes before the first frame that is not whole is copied as it is
and ended like any capture, with definitions, totals that say `recovered`, index and trailer. The result is verified
before it gets its name.
"""

from __future__ import annotations

import os

from replayfmt.errors import InvalidCapture, UnsupportedVersion, UsageError

from ..codes import MINOR_VERSION, FrameKind
from ..container.contents import Contents, bound_definitions, read_frame, read_preamble, read_session, walk_contents
from ..container.frame_output import FrameOutput
from ..container.frames import MAX_BODY_BYTES, Preamble
from ..container.output import Output, same_file
from ..container.payload_input import PayloadInput
from ..container.source import Source
from ..definitions.reading import Definitions, Frozen
from ..definitions.tables import encode_tables
from ..summary import Tally
from .check import CheckReport, check_capture
from .verify import PayloadLengths, Progress, Verifier, kept

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
        return _Recovery(source, preamble, progress).run(Output(out, force, doing="recovering"))
    finally:
        source.close()


class _Recovery:
    def __init__(self, source: Source, preamble: Preamble, progress: Progress) -> None:
        self._source = source
        self._preamble = preamble
        self._progress = progress
        self._tally = Tally()
        self._ended: int | None = None  # where the capture got as far as writing that down

    def run(self, output: Output) -> tuple[CheckReport, str]:
        try:
            contents = walk_contents(self._source, None, "")
            bound_definitions(self._source, contents)
            read_session(self._source, contents, self._preamble)
            whole, left = self._whole(contents)
            self._copy(whole, output)
            self._finish(whole, output)
            report = check_capture(output.partial, CheckReport(output.path), self._progress)
            output.finish()
            return report, left
        except BaseException:
            output.discard()
            raise

    def _whole(self, contents: Contents) -> tuple[Contents, str]:
        """The contents before the first frame that is not whole, and what is wrong from there on."""
        contents, left = self._defined(contents)
        verifier = Verifier(self._source, contents, self._progress)
        position = 0
        try:
            for position in range(len(contents.frames)):
                verifier.verify(position)
            position = len(contents.frames)
        except UnsupportedVersion:
            raise
        except InvalidCapture as error:
            left = str(error)
        self._tally = verifier.tally
        self._ended = verifier.summary.ended_ns if verifier.summary else None
        return kept(contents, position), left

    def _defined(self, contents: Contents) -> tuple[Contents, str]:
        """The contents before the first definitions that cannot be used."""
        definitions, lengths = Definitions(), PayloadLengths(contents)
        for position in contents.of_kind(FrameKind.tables).tolist():
            try:
                header, body, where = read_frame(self._source, contents.frames, position)
                if not header.consolidated:
                    definitions.add(body, header.minor, where, lengths.before(position))
            except UnsupportedVersion:
                raise
            except InvalidCapture as error:
                return kept(contents, position), str(error)
        return contents, contents.incomplete_reason

    def _copy(self, whole: Contents, output: Output) -> None:
        for start in range(0, whole.end, _COPY_BYTES):
            count = min(_COPY_BYTES, whole.end - start)
            output.write([self._source.read(start, count, "frames")])
            self._progress(count)

    def _finish(self, whole: Contents, output: Output) -> None:
        definitions, lengths = Definitions(), PayloadLengths(whole)
        for position in whole.of_kind(FrameKind.tables).tolist():
            header, body, where = read_frame(self._source, whole.frames, position)
            definitions.add(body, header.minor, where, lengths.before(position))
        frozen = Frozen(definitions, self._source.path)
        frames = FrameOutput(output, min(self._preamble.minor, MINOR_VERSION))
        frames.adopt(whole.frames.tobytes(), whole.records, self._tally.storages + 1)
        tables = _encode_all(definitions)
        payload_bytes = PayloadInput(self._source, whole.payloads).raw_bytes
        summary = self._tally.summary(frozen, payload_bytes, self._ended, recovered=True)
        frames.finish(tables, summary, whole.payloads.tobytes())


def _encode_all(definitions: Definitions) -> memoryview | None:
    """Every definition in one body; None if there are none, or so many that only the single frames hold them."""
    strings, columns = [text.encode() for text in definitions.strings], definitions.columns()
    size = sum(len(text) + 16 for text in strings) + sum(column.nbytes + 16 for column in columns.values())
    if not any(definitions.counts.values()) or size > MAX_BODY_BYTES:
        return None
    return encode_tables(strings, columns, dict.fromkeys(definitions.counts, 1))
