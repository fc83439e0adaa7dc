"""Writing a long output from several processes: each makes some of its parts, and they take turns in writing them.

Nothing but whose turn it is passes between the processes, around a ring of pipes. What another process than the first
fails to make or to write is left to the first one, with all that comes after it: so its exceptions are those of a
process that writes alone.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import chain
from typing import IO

from replayfmt.errors import OpReplayError

Make = Callable[[int], Iterator[str]]  # the chunks of a part; parts are requested in order
_AHEAD = 1 << 24  # characters that a process keeps until its turn comes, and the chunk that goes beyond


@dataclass(frozen=True)
class _Turn:
    """The part to write next, of which `written` chunks are there. `failed`: the first process goes on alone."""

    part: int
    written: int = 0
    failed: bool = False

    FORM = struct.Struct("<qq?")


class _Neighbours:
    """The pipes by which one process gets its turns and passes them on. Closes those of the others."""

    def __init__(self, ring: list[tuple[int, int]], place: int) -> None:
        self._read, self._write = ring[place][0], ring[(place + 1) % len(ring)][1]
        for end in {each for pipe in ring for each in pipe} - {self._read, self._write}:
            os.close(end)

    def wait(self) -> _Turn:
        """Raises EOFError if a neighbour ended."""
        read = os.read(self._read, _Turn.FORM.size)
        if not read:
            raise EOFError
        return _Turn(*_Turn.FORM.unpack(read))

    def give(self, turn: _Turn) -> None:
        """Raises EOFError if a neighbour ended."""
        try:
            os.write(self._write, _Turn.FORM.pack(*astuple(turn)))
        except BrokenPipeError:
            raise EOFError from None

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def write_in_turns(parts: int, maker: Callable[[], Make], output: IO[bytes], processes: int) -> None:
    """Write parts 0 to `parts` - 1, in order and in UTF-8. `output` is a file of the system's.

    Raises what `make` and writing raise, after what comes before it in the output; OpReplayError if one of the
    processes is killed.
    """
    output.flush()
    ring = [os.pipe() for _ in range(processes)]
    children: list[int] = []
    for place in range(1, processes):
        children.append(os.fork())
        if not children[-1]:
            status = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process says that it was interrupted
                _take_turns(_Neighbours(ring, place), place, parts, maker(), output, processes)
                status = 0
            finally:
                os._exit(status)
    neighbours = _Neighbours(ring, 0)
    try:
        turn = _take_turns(neighbours, 0, parts, maker(), output, processes)
        make = maker()
        for part in range(turn.part, parts):
            for number, chunk in enumerate(make(part)):
                if part > turn.part or number >= turn.written:
                    write_chunk(output, chunk)
    except EOFError:
        raise OpReplayError(
            "a process that wrote a part of the rows was killed: the output is incomplete; run it again, with more "
            "memory free"
        ) from None
    finally:
        neighbours.close()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # it has nothing left to write
            os.waitpid(child, 0)


def _take_turns(
    neighbours: _Neighbours, place: int, parts: int, make: Make, output: IO[bytes], processes: int
) -> _Turn:
    """Write every part whose turn comes here. Returns the last turn: all is written, or the first process goes on."""
    part = place
    while True:
        chunks = _begun(make(part)) if part < parts else iter(())
        turn = neighbours.wait() if part else _Turn(0)
        if turn.failed or turn.part >= parts:
            if place:
                neighbours.give(turn)
            return turn
        written = 0
        try:
            for chunk in chunks:
                write_chunk(output, chunk)
                written += 1
            turn = _Turn(part + 1)
        except Exception:
            if not place:
                raise
            turn = _Turn(part, written, failed=True)
        neighbours.give(turn)
        if turn.failed:
            return turn
        part += processes


def _begun(chunks: Iterator[str]) -> Iterator[str]:
    """The same chunks, the first of them made now. What that raises is raised in its place."""
    made: list[str] = []
    try:
        for chunk in chunks:
            made.append(chunk)
            if sum(map(len, made)) > _AHEAD:
                break
    except Exception as error:
        return chain(made, _failing(error))
    return chain(made, chunks)


def _failing(error: Exception) -> Iterator[str]:
    raise error
    yield


def write_chunk(output: IO[bytes], chunk: str) -> None:
    """Write text in UTF-8, whatever the locale, and at once."""
    output.write(chunk.encode("utf-8", "backslashreplace"))
    output.flush()
