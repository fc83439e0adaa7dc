"""Writing a long output from several processes: each makes some of its parts, and they take turns in writing them.

Nothing but whose turn it is passes between the processes, around a ring of pipes. What another process than the first
fails to make or to write is left to the first one, with all that comes after it: so its exceptions are those of a
process that writes alone.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from replayfmt.errors import OpReplayError

Make = Callable[[int], Iterator[str]]  # the chunks of a part; parts are requested in order
Write = Callable[[Iterable[str]], None]  # writes chunks at once, to a file of the system's
_AHEAD = 1 << 24  # characters that a process keeps until its turn comes, and the chunk that goes beyond


_FORM = struct.Struct("<qq?")


class _Turn(NamedTuple):
    """The part to write next, of which `written` chunks are there. `failed`: the first process goes on alone."""

    part: int
    written: int = 0
    failed: bool = False


class _Neighbours:
    """The pipes by which one process gets its turns and passes them on. Closes those of the others."""

    def __init__(self, ring: list[tuple[int, int]], place: int) -> None:
        self._read, self._write = ring[place][0], ring[(place + 1) % len(ring)][1]
        for end in {each for pipe in ring for each in pipe} - {self._read, self._write}:
            os.close(end)

    def wait(self) -> _Turn:
        """Raises EOFError if a neighbour ended."""
        read = os.read(self._read, _FORM.size)
        if not read:
            raise EOFError
        return _Turn(*_FORM.unpack(read))

    def give(self, turn: _Turn) -> None:
        """Raises EOFError if a neighbour ended."""
        try:
            os.write(self._write, _FORM.pack(*turn))
        except BrokenPipeError:
            raise EOFError from None

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def write_in_turns(parts: int, maker: Callable[[], Make], write: Write, processes: int) -> None:
    """Write parts 0 to `parts` - 1, in order. Each process makes its own with what `maker` returns.

    Raises what making and writing raise, after what comes before it in the output; OpReplayError if one of the
    processes is killed.
    """
    ring = [os.pipe() for _ in range(processes)]
    children: list[int] = []
    with suppress(OSError):  # no more processes can be made: this one writes alone
        for place in range(1, processes):
            children.append(os.fork())
            if not children[-1]:
                status = 1
                try:
                    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process says that it was interrupted
                    _take_turns(_Neighbours(ring, place), range(place, parts, processes), maker(), write, parts)
                    status = 0
                finally:
                    os._exit(status)
    neighbours = _Neighbours(ring, 0)
    try:
        turn = _Turn(0)
        if parts and len(children) == processes - 1:
            turn = _take_turns(neighbours, range(0, parts, processes), maker(), write, parts)
        if turn.part < parts:
            make = maker()
            for part in range(turn.part, parts):
                for number, chunk in enumerate(make(part)):
                    if part > turn.part or number >= turn.written:
                        write([chunk])
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


def _take_turns(neighbours: _Neighbours, mine: range, make: Make, write: Write, parts: int) -> _Turn:
    """Write each part of `mine` when its turn comes. Returns the last turn: all is written, or the first process goes
    on alone."""
    is_first = mine.start == 0
    for part in mine:
        chunks = _begun(make(part))
        turn = neighbours.wait() if part else _Turn(0)
        if turn.failed:
            break
        written = 0
        try:
            for chunk in chunks:
                write([chunk])
                written += 1
            turn = _Turn(part + 1)
        except Exception:
            if is_first:
                raise
            turn = _Turn(part, written, failed=True)
            break
        neighbours.give(turn)
    else:
        turn = neighbours.wait()
    if not is_first:
        neighbours.give(turn)
    return turn


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
