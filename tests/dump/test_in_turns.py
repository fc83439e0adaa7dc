"""Long dumps are written by several processes, and nobody can tell."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.dump.in_turns import write_in_turns
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.errors import InvalidCapture, OpReplayError
from replayfmt.format.reader import open_capture

PARTS = 7


def chunks_of(part: int) -> Iterator[str]:
    for chunk in range(part % 3 + 1):
        yield f"part {part}, chunk {chunk}\n"


def written(path: Path, make: Callable[[int], Iterator[str]], processes: int, parts: int = PARTS) -> str:
    with open(path, "w", buffering=1) as output:
        write_in_turns(parts, lambda: make, output.writelines, processes)
    return path.read_text()


@pytest.mark.parametrize("processes", [1, 2, 3, 10])
def test_parts_of_several_processes_are_written_in_order(tmp_path: Path, processes: int) -> None:
    everything = "".join(chunk for part in range(PARTS) for chunk in chunks_of(part))
    assert written(tmp_path / "out", chunks_of, processes) == everything
    assert written(tmp_path / "none", chunks_of, processes, parts=0) == ""


@pytest.mark.parametrize("part", range(PARTS))
def test_what_a_part_raises_is_raised_after_what_comes_before_it(tmp_path: Path, part: int) -> None:
    """Whichever process the part is in, and whichever of its chunks fails."""
    for chunk in range(part % 3 + 1):

        def fails(number: int, last: int = chunk) -> Iterator[str]:
            for place, text in enumerate(chunks_of(number)):
                if (number, place) == (part, last):
                    raise InvalidCapture(f"part {part}")
                yield text

        before = [each for number in range(part) for each in chunks_of(number)] + list(chunks_of(part))[:chunk]
        with pytest.raises(InvalidCapture, match=f"part {part}"):
            written(tmp_path / "out", fails, 3)
        assert (tmp_path / "out").read_text() == "".join(before)


def test_what_another_process_could_not_make_the_first_one_does(tmp_path: Path) -> None:
    first = os.getpid()

    def short_of_memory(part: int) -> Iterator[str]:
        for place, chunk in enumerate(chunks_of(part)):
            if os.getpid() != first and place == 1:
                raise MemoryError
            yield chunk

    assert written(tmp_path / "out", short_of_memory, 3) == written(tmp_path / "alone", chunks_of, 1)


def test_a_process_that_is_killed_ends_the_output_with_an_error(tmp_path: Path) -> None:
    first = os.getpid()

    def killed(part: int) -> Iterator[str]:
        if os.getpid() != first and part > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return chunks_of(part)

    for processes in (2, 3):
        with pytest.raises(OpReplayError, match="killed"):
            written(tmp_path / "out", killed, processes)


def test_where_no_process_can_be_made_one_writes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([os.fork])  # the second one fails

    def fork() -> int:
        try:
            return next(made)()
        except StopIteration:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable") from None

    monkeypatch.setattr(os, "fork", fork)
    assert written(tmp_path / "out", chunks_of, 3) == "".join(each for part in range(PARTS) for each in chunks_of(part))


@pytest.fixture(scope="module")
def long_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "long.opreplay"
    x = torch.zeros(2)
    with replayfmt.capture(path):
        for _ in range(45_000):
            x.add_(1)
    return path


def dumped(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opreplay_tools.dump", *flags, str(path)], capture_output=True, text=True, timeout=300
    )


def test_a_long_capture_is_dumped_as_by_one_process(long_capture: Path) -> None:
    for flags, chunks in ((("--format=jsonl",), jsonl_chunks), ((), text_chunks)):
        with open_capture(long_capture) as reader:
            expected = "".join(chunks(reader, Selection()))
        shown = dumped(long_capture, *flags)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == expected


def test_a_damaged_frame_of_a_long_capture_ends_the_dump_where_one_process_would(
    long_capture: Path, tmp_path: Path
) -> None:
    with open_capture(long_capture) as reader:
        frames = list(reader.record_frames)
    for number in (0, 1):  # of one process, and of the other
        damaged = tmp_path / "damaged.opreplay"
        content = bytearray(long_capture.read_bytes())
        middle = (frames[number].offset + frames[number + 1].offset) // 2
        content[middle : middle + 8] = bytes(8 * [0x5A])
        damaged.write_bytes(content)
        before = ""
        with open_capture(damaged) as reader, pytest.raises(InvalidCapture) as raised:
            for chunk in jsonl_chunks(reader, Selection()):
                before += chunk
        shown = dumped(damaged, "--format=jsonl")
        assert shown.stdout == before and shown.returncode == 3
        assert str(raised.value) in shown.stderr
