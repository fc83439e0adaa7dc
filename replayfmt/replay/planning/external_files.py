"""The external files of a capture in a replay: found, validated, and held open from the plan to its last run.

Content comes from the same descriptor that was validated. Before each run the files are checked again: the replay ends
before its first op if one was changed or shortened, or if its path now leads to another file. Two cases cannot be
noticed: a change within the time stamp's granularity that keeps the length, and a file that is shortened while ops run
on a map of it, which ends the process. Owns the descriptors; maps outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import torch
from xxhash import xxh3_128

from replayfmt.errors import ExternalFileProblem, ReplayRefused
from replayfmt.format.external_files import FileRemaps, OpenedFile, Progress, missing
from replayfmt.format.model import ExternalFile, FileRange
from replayfmt.format.reader import CaptureReader

# PyTorch's own memory begins at multiples of this. Kernels give other last bits at other places (gemv at 8 bytes past a
# multiple of 16 does), so content is where it was under capture: as PyTorch places it, or as the file does.
_ALIGNMENT = 64
# Where the program used elements in place, in its map of the file, they are at least at multiples of this.
_MAP_ALIGNMENT = 8
_PIECE_BYTES = 4 << 20


class ExternalFiles:
    """The files that a capture's ranges are in. Close it when no more runs follow."""

    def __init__(self, reader: CaptureReader, remaps: Sequence[str] = ()) -> None:
        """`remaps` are CAPTURED=REPLAY texts. Raises UsageError if one is wrong or matches no file."""
        self._reader = reader
        self._remaps = FileRemaps.parse(remaps)
        if self._remaps:
            self._remaps.check_used([file.path for file in reader.files[1:] if file is not None])
        self._opened: dict[int, OpenedFile] = {}
        self._whole: dict[int, memoryview] = {}  # embedded files that are in use, by payload id
        self._hashes: dict[int, int] = {}

    def validate(
        self, on_bytes: Callable[[int, int], None] | None = None, *, ranges: Collection[int] | None = None
    ) -> list[str]:
        """Open every file that provides content, or those that these ranges are in; a sentence for each that is not the
        one that was captured.

        `on_bytes(done, of all)` is called, from any thread, while digests are computed.
        """
        findings = []
        needed = {self._range(each).file for each in self._ranges() if self._reader.embedded_range(each) is None}
        digested = sum(self._file(number).bytes for number in needed if self._file(number).digest is not None)
        progress = None if on_bytes is None else _summed(on_bytes, digested)
        if ranges is not None:
            needed &= {self._range(number).file for number in ranges}
        for number in sorted(needed - set(self._opened)):
            file = self._file(number)
            path = self._remaps.apply(file.path)
            remapped = path != file.path
            try:
                opened = OpenedFile(path)
            except ExternalFileProblem as error:
                findings.append(missing(error, file, remapped))
                continue
            problem = opened.problem(file, remapped, progress)
            if problem is None:
                self._opened[number] = opened
            else:
                opened.close()
                findings.append(problem)
        return findings

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know about where content comes from."""
        embedded = sum(self._reader.embedded_range(each) is not None for each in self._ranges())
        if not embedded:
            return ()
        return (
            f"the bytes of {embedded} range{'s' if embedded > 1 else ''} of external files come from the capture "
            "itself: this replay is not a benchmark of storage",
        )

    def check(self) -> None:
        """Raises ReplayRefused if a file is not what it was when it was validated."""
        findings = tuple(problem for opened in self._opened.values() if (problem := opened.changed()) is not None)
        if findings:
            raise ReplayRefused(
                f"{self._reader.path}: external files are not what they were when the plan was made; make a new plan",
                findings,
            )

    def problem(self, number: int) -> str | None:
        """Why the range with this id has no content here; None if it has."""
        captured = self._range(number)
        if self._reader.embedded_range(number) is not None or captured.file in self._opened:
            return None
        return f"external file {self._file(captured.file).path} is not here as it was captured"

    def mapped(self, number: int, *, in_place: bool) -> torch.UntypedStorage | None:
        """A host storage that is a private map of a range by id: only pages that are touched are read, and writes stay
        in memory. `in_place`: the program used it as a map too, so it may be where the file has it.

        None if the range is in the capture, or where its bytes are not where they should be in memory.
        """
        captured = self._range(number)
        alignment = _MAP_ALIGNMENT if in_place else _ALIGNMENT
        if self._reader.embedded_range(number) is not None or captured.offset % alignment or not captured.bytes:
            return None
        try:
            view = self._open(captured).map(captured.offset, captured.bytes, copy_on_write=True)
        except ExternalFileProblem:
            return None  # too many maps, or no address space: reading finds what else may be wrong
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def placed_alike(self, number: int) -> torch.UntypedStorage:
        """A host storage for a range by id, unfilled, that begins as far past a multiple of 64 as a map of it would."""
        captured = self._range(number)
        if not captured.bytes:
            return torch.UntypedStorage(0)
        memory = bytearray(captured.bytes + _ALIGNMENT)
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        shift = (captured.offset - begin) % _ALIGNMENT
        view = memoryview(memory)[shift : shift + captured.bytes]
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def read_into(self, number: int, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with a range's bytes from `offset` within it on. Raises ReplayRefused if they are gone."""
        captured = self._range(number)
        payload = self._reader.embedded_range(number)
        if payload is None:
            try:
                self._open(captured).read_into(captured.offset + offset, buffer)
            except ExternalFileProblem as error:
                raise ReplayRefused(f"{self._reader.path}: {error}", (str(error),)) from None
            return
        number_of_payload, start = payload
        if number_of_payload not in self._whole:
            self._whole[number_of_payload] = memoryview(self._reader.payload(number_of_payload)).cast("B")
        buffer[:] = self._whole[number_of_payload][start + offset : start + offset + len(buffer)]

    def hash_range(self, number: int) -> int:
        """The XXH3-128 of a range's bytes, read once: a file that changes is not used any more. Raises ReplayRefused
        where they are gone."""
        if number in self._hashes:
            return self._hashes[number]
        length = self._range(number).bytes
        hashing = xxh3_128()
        buffer = memoryview(bytearray(min(length, _PIECE_BYTES)))
        for start in range(0, length, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, length - start)]
            self.read_into(number, piece, start)
            hashing.update(piece)
        self._hashes[number] = hashing.intdigest()
        return self._hashes[number]

    def close(self) -> None:
        """Close the files. Closing twice does nothing."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
        self._whole.clear()

    def _ranges(self) -> range:
        return range(1, len(self._reader.file_ranges))

    def _range(self, number: int) -> FileRange:
        return self._reader.file_ranges[number]

    def _file(self, number: int) -> ExternalFile:
        return self._reader.files[number]

    def _open(self, captured: FileRange) -> OpenedFile:
        opened = self._opened.get(captured.file)
        if opened is None:  # a plan that keeps going, although the file is not what it was
            raise ExternalFileProblem(f"external file {self._file(captured.file).path} was not validated")
        return opened


def _summed(on_bytes: Callable[[int, int], None], total: int) -> Progress:
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        on_bytes(done, total)

    return progress
