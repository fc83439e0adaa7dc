"""Writing a long output from several processes: each makes some of its parts, and the first one writes all of them.

What another process fails to make is left to the first one, with all that comes after it: so its exceptions are those
of a process that works alone.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from replayfmt.errors import OpReplayError

Make = Callable[[int], Iterator[str]]  # the chunks of a part; parts are requested in order
Write = Callable[[Iterable[str]], None]  # writes chunks at once

_LENGTH = struct.Struct("<q")  # of the chunk that follows, in bytes; or one of these
_END_OF_PART, _FAILED = -1, -2


class _Maker:
    """Another process, which makes some parts and passes them on through a pipe. `failed`: it makes no more."""

    def __init__(self, mine: range, maker: Callable[[], Make]) -> None:
        """Raises OSError where no process can be made."""
        self.failed = False
        read, write = os.pipe()
        try:
            self._process = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if not self._process:
            status = 1
            try:
                os.close(read)
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process says that it was interrupted
                _pass_on(mine, maker(), write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        self._pipe = open(read, "rb")  # noqa: SIM115 - closed by `end`

    def chunks(self) -> Iterator[str]:
        """The chunks of its next part; of one that it fails to make, those before. Raises OpReplayError if it is
        killed."""
        while (length := _LENGTH.unpack(self._read(_LENGTH.size))[0]) >= 0:
            yield self._read(length).decode("utf-8", "surrogatepass")
        self.failed = length == _FAILED

    def _read(self, length: int) -> bytes:
        content = self._pipe.read(length)
        if len(content) < length:
            raise OpReplayError(
                "a process that made a part of the rows was killed: the output is incomplete; run it again, with more "
                "memory free"
            )
        return content

    def end(self) -> None:
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)  # what it makes now is not needed
        os.waitpid(self._process, 0)


def _pass_on(mine: range, make: Make, pipe: int) -> None:
    with open(pipe, "wb") as out:
        for part in mine:
            try:
                for chunk in make(part):
                    content = chunk.encode("utf-8", "surrogatepass")
                    out.write(_LENGTH.pack(len(content)))
                    out.write(content)
            except Exception:
                out.write(_LENGTH.pack(_FAILED))
                return
            out.write(_LENGTH.pack(_END_OF_PART))
            out.flush()


def write_in_turns(parts: int, maker: Callable[[], Make], write: Write, processes: int) -> None:
    """Write parts 0 to `parts` - 1, in order. Each process makes its own with what `maker` returns.

    Raises what making and writing raise, after what comes before it in the output; OpReplayError if one of the
    processes is killed.
    """
    others: list[_Maker] = []
    try:
        with suppress(OSError):  # no more processes can be made: this one works alone
            for place in range(1, processes):
                others.append(_Maker(range(place, parts, processes), maker))
        make, alone = maker(), len(others) < processes - 1
        for part in range(parts):
            written, place = 0, part % processes
            if place and not alone:
                for chunk in others[place - 1].chunks():
                    write([chunk])
                    written += 1
                alone = others[place - 1].failed
                if not alone:
                    continue
            for number, chunk in enumerate(make(part)):
                if number >= written:
                    write([chunk])
    finally:
        for each in others:
            each.end()
