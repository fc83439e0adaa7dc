"""The writer: names of files, failures, what it refuses of its caller, signals, forks, memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from replayfmt.errors import CaptureFailed, OutputExists
from replayfmt.format.codes import Codec, DType, FrameKind, Layout, RecordKind, ValueKind
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.model import Device, Generator, TensorMeta
from replayfmt.format.output import Uninterrupted
from replayfmt.format.reader import open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter

from .reading import read_all
from .samples import SESSION, Records, marker, write_small

V = ValueKind


# ---------------------------------------------------------------------------------------------------- names of files


def test_the_final_name_appears_only_when_the_capture_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = write_small(path, close=False)
    assert [p.name for p in tmp_path.iterdir()] == ["a.opreplay.partial"]
    writer.close(1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.opreplay"]
    writer.close(1)  # idempotent
    check_capture(path)


def test_an_existing_output_is_refused_without_force_and_replaced_with_it_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    path.write_text("precious")
    with pytest.raises(OutputExists, match=r"a.opreplay: exists already; .*--force"):
        CaptureWriter(path, SESSION)
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]
    writer = CaptureWriter(path, SESSION, force=True)
    assert path.read_text() == "precious"
    writer.close(1)
    check_capture(path)


def test_an_earlier_partial_is_refused_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_small(path, close=False).abandon()
    with pytest.raises(OutputExists, match=r"a.opreplay.partial: exists already.*--recover"):
        CaptureWriter(path, SESSION)
    CaptureWriter(path, SESSION, force=True).close(1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.opreplay"]


def test_with_force_two_writers_of_one_name_do_not_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    first = write_small(path, close=False)
    second = CaptureWriter(path, SESSION, force=True)
    first.generator(Generator(first.device(Device("cpu")), True))
    second.close(1)
    check_capture(path)
    with pytest.raises(CaptureFailed, match="was removed or replaced while it was being written"):
        first.close(1)
    check_capture(path)


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = write_small(path, close=False)
    path.write_text("precious")
    with pytest.raises(CaptureFailed, match="is complete, but could not be renamed"):
        writer.close(1)
    assert path.read_text() == "precious"
    check_capture(f"{path}.partial")


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed, match="there is no directory .*; create it first"):
        CaptureWriter(tmp_path / "missing" / "a.opreplay", SESSION)
    with pytest.raises(CaptureFailed, match="is a directory"):
        CaptureWriter(tmp_path, SESSION, force=True)


@pytest.mark.slow
def test_while_capturing_the_file_is_only_appended_to_and_always_ends_with_a_whole_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    records = Records(writer)
    before = b""
    for number in range(20):
        writer.payload(os.urandom((50, 5_000, 90_000)[number % 3]))
        records.add(marker(RecordKind.scope_begin, f"step {number}"), scope=writer.scope(0, f"step {number}"))
        records.write()
        now = Path(f"{path}.partial").read_bytes()
        assert now.startswith(before) and len(now) > len(before) and len(now) % 64 == 0
        with open_capture(f"{path}.partial") as reader:
            assert reader.record_count == number + 1 and reader.contents.end == len(now)
        before = now
    writer.close(1)
    assert path.read_bytes().startswith(before)


# ---------------------------------------------------------------------------------------------------------- failures


def _fill(writer: CaptureWriter) -> None:
    for number in range(1000):
        writer.payload(np.full(20_000, number, np.float64).data[: 160_000 - number])
        writer.payload(os.urandom(100_000))


def test_a_full_disk_is_one_clear_error_at_every_later_call_and_leaves_what_can_be_recovered(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = write_small(path, frames=3, close=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CaptureFailed) as first:
            _fill(writer)
        message = str(first.value)
        assert f"{path}.partial: could not be written at 0x" in message and "File too large" in message
        assert f"opreplay-check {path}.partial --recover OUT" in message
        for call in (
            lambda: writer.payload(b"x"),
            lambda: writer.string("x"),
            lambda: writer.scope(0, "x"),
            lambda: writer.generator(Generator(1, True)),
            writer.flush,
            lambda: writer.close(1),
            lambda: writer.records(RecordColumns([], [], [], [], [], [], [], [], {})),
            lambda: writer.close(1),
        ):
            with pytest.raises(CaptureFailed) as later:
                call()
            assert str(later.value) == message
        writer.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not path.exists()
    recover_capture(f"{path}.partial", path)
    assert len(read_all(path)[1]) == 6


def test_no_space_names_the_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write_small(tmp_path / "a.opreplay", close=False)

    def full(_fd: int, _views: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(CaptureFailed, match="No space left on device; the disk is full; the capture ends here"):
        writer.close(1)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a write of more than 2 GiB, or one that a signal came upon, does: less than was asked."""
    original = os.writev

    def short(fd: int, views: list[memoryview]) -> int:
        return original(fd, [memoryview(views[0])[:7]])

    monkeypatch.setattr(os, "writev", short)
    path = tmp_path / "a.opreplay"
    write_small(path)
    monkeypatch.undo()
    check_capture(path)


def test_a_forked_child_cannot_write_into_its_parents_capture(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = write_small(path, close=False)
    child = os.fork()
    if not child:
        try:
            writer.close(1)
        except CaptureFailed as error:
            os._exit(7 if "forked child" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    writer.close(1)
    check_capture(path)


# ----------------------------------------------------------------------------------------------------------- signals


def test_an_interrupt_during_a_write_is_raised_after_it_and_the_capture_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.opreplay"
    writer = write_small(path, frames=1, close=False)
    records = Records(writer, next_storage=3)
    scope = writer.scope(0, "execute")
    original = os.writev

    def interrupted(fd: int, views: list[memoryview]) -> int:
        signal.raise_signal(signal.SIGINT)
        return original(fd, [memoryview(views[0])[:100]])

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "writev", interrupted)
    for call in (records.write, lambda: writer.payload(os.urandom(100_000)), lambda: writer.close(1)):
        if call == records.write:
            records.add(marker(RecordKind.scope_begin, "execute"), scope=scope)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    check_capture(path)
    assert open_capture(path).record_count == 3 and len(open_capture(path).payloads) == 2


def test_interrupts_are_put_off_again_after_a_time_in_which_they_were_ignored() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, signal.SIG_IGN)
    try:
        with Uninterrupted():
            pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done


def test_a_handler_that_raises_keeps_no_other_from_its_signal() -> None:
    """An interrupt and a request to end arrive together: each reaches its handler, and both handlers are back."""
    ended: list[int] = []

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)), Uninterrupted():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
        assert ended == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_interrupts_at_any_moment_leave_the_capture_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    records = Records(writer)
    scope = writer.scope(0, "execute")
    caught = written = 0

    class Stop(Exception):
        pass

    def stop(_number: int, _frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for number in range(600):
            records.add(marker(RecordKind.scope_begin, "execute"), scope=scope)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + number % 97 * 3e-6)
                writer.payload(number.to_bytes(4, "little") * 9000)
                writer.string(f"string {number}")
                writer.meta(TensorMeta(DType.int8, Layout.strided, writer.device(Device("cpu")), (number,), (1,)))
                records.write()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            records.rows, records.slots, records.born = [], ([], [], []), []
            written = writer._frames.next_ordinal
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.close(1)
    report = check_capture(path)
    assert sum(report.records.values()) == report.records.get(RecordKind.scope_begin, 0) == written and caught


def test_in_another_thread_signal_handlers_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    thread = threading.Thread(target=write_small, args=(path,))
    thread.start()
    thread.join()
    check_capture(path)


# ---------------------------------------------------------------------------------------------------------- payloads


def test_small_payloads_share_frames_and_a_large_one_takes_those_that_wait_along(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    for number in range(300):
        writer.payload(os.urandom(100) + bytes([number % 256]))
    writer.payload(os.urandom(70_000))
    writer.payload(os.urandom(10))
    writer.close(1)
    reader = open_capture(path)
    frames = reader.contents.frames
    assert frames["count"][frames["kind"] == FrameKind.payload].tolist() == [301, 1]
    assert [info.id for info in reader.payloads] == list(range(1, 303))
    check_capture(path)


def test_waiting_payloads_are_bounded(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    for _ in range(64):
        writer.payload(os.urandom(60_000))
        assert len(writer._payloads._waiting_data) <= 1 << 20
    assert (tmp_path / "a.opreplay.partial").stat().st_size > 2_000_000
    writer.abandon()


def test_a_payload_is_copied_or_written_before_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    for size in (100, 1_000_000):
        live = bytearray(os.urandom(size))
        before = bytes(live)
        number = writer.payload(live)
        live[:] = bytes(size)
        live.clear()  # nothing of it is held: a buffer that is exported could not be resized
        writer.flush()
        assert bytes(open_capture(f"{path}.partial").payload(number)) == before
    writer.close(1)
    check_capture(path)


def test_a_payload_that_comes_in_the_middle_of_another_one_changes_nothing_of_it(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    outer, inner = (bytearray(os.urandom(100_000)) for _ in range(2))
    numbers: list[int] = []

    @contextmanager
    def whole() -> Iterator[None]:  # as a signal handler may, which comes before
        numbers.append(writer.payload(inner))
        with writer._whole():
            yield

    numbers.append(writer._payloads.add(outer, whole))
    writer.close(1)
    with open_capture(tmp_path / "a.opreplay") as reader:
        assert [bytes(reader.payload(number)) for number in numbers] == [inner, outer]


def test_only_what_compresses_well_is_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    generator = np.random.default_rng(0)
    contents = {
        "tokens": (generator.integers(0, 50_000, 40_000), Codec.zstd),
        "zeros": (np.zeros(300_000), Codec.zstd),
        "floats": (generator.standard_normal(40_000, np.float32), Codec.none),
        "short": (np.zeros(20), Codec.none),
        "half": (np.concatenate([generator.random(40_000), np.zeros(15_000)]), Codec.none),
    }
    numbers = {name: writer.payload(array.data) for name, (array, _codec) in contents.items()}
    writer.close(1)
    reader = open_capture(path)
    assert {n: reader.payload_info(i).codec for n, i in numbers.items()} == {n: c for n, (_a, c) in contents.items()}
    for name, (array, _codec) in contents.items():
        assert bytes(reader.payload(numbers[name])) == array.tobytes()
    assert isinstance(reader.payload(numbers["floats"]), memoryview)


def test_buffers_of_any_shape_and_type_are_payloads_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    square = np.arange(12, dtype=np.int16).reshape(3, 4)
    flat = square.tobytes()
    assert writer.payload(square.data) == writer.payload(flat) == writer.payload(bytearray(flat))
    assert writer.payload(np.zeros((0, 3)).data) == writer.payload(b"")
    writer.close(1)
    assert bytes(open_capture(path).payload(1)) == square.tobytes()


# ------------------------------------------------------------------------------------------------------------ memory

_MANY = """
import sys, os, gc
import numpy as np, psutil
from replayfmt.format.writer import CaptureWriter
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.model import Device, Kernel, Node, CaptureInfo, Signature, TensorMeta
from replayfmt.format.codes import DType, Layout, OpStatus, RecordKind, ValueKind as V

COUNT, CHUNK = 5_000_000, 16384
writer = CaptureWriter(sys.argv[1], CaptureInfo("00112233-4455-6677-8899-aabbccddeeff", "opreplay", "1"))
cpu = writer.device(Device("cpu"))
kernel = writer.kernel(Kernel("a::b", "default", "s"))
meta = writer.meta(TensorMeta(DType.int8, Layout.strided, cpu, (8,), (1,)))
args, results = (Node(V.tensor, "x"), Node(V.int, "n")), (Node(V.tensor),)
op = writer.signature(Signature(RecordKind.op, args, results, kernel, OpStatus.ok))
process = psutil.Process()
first = None
for chunk in range(COUNT // CHUNK + 1):
    ids = np.arange(chunk * CHUNK + 1, (chunk + 1) * CHUNK + 1)
    scope = writer.scope(0, f"step {chunk}")
    writer.records(RecordColumns(
        np.full(CHUNK, op), np.full(CHUNK, scope), np.zeros(CHUNK, np.uint16), ids * 1000, np.full(CHUNK, 500),
        np.repeat(ids, 2), ids, np.zeros(0), {i: (i, 0, meta) for i in ids.tolist()}, chunk * CHUNK + 1,
        np.full(CHUNK, 8), np.full(CHUNK, cpu), np.full(CHUNK, 1), np.zeros(CHUNK, np.int64)))
    if chunk == 10:
        first = process.memory_info().rss
writer.close(1)
print(process.memory_info().rss - first)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_records(tmp_path: Path) -> None:
    path = tmp_path / "many.opreplay"
    result = subprocess.run([sys.executable, "-c", _MANY, str(path)], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 50 << 20
    with open_capture(path) as reader:
        assert reader.record_count >= 5_000_000
        assert reader.record(4_999_999).start_ns == 5_000_000_000
    before = psutil.Process().memory_info().rss
    check_capture(path)
    assert psutil.Process().memory_info().rss - before < 150 << 20


@pytest.mark.parametrize("pattern", ["random", "zeros"])
@pytest.mark.parametrize("length", [1000, 200_000, 3_000_001])
def test_content_that_changes_while_it_is_written_leaves_a_valid_file(
    tmp_path: Path, length: int, pattern: str
) -> None:
    content = (
        np.random.default_rng(0).integers(0, 256, length, np.uint8)
        if pattern == "random"
        else np.zeros(length, np.uint8)
    )
    ended = threading.Event()

    def keep_changing() -> None:
        while not ended.is_set():
            content[:] += np.uint8(1)

    thread = threading.Thread(target=keep_changing)
    thread.start()
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    numbers = set()
    try:
        for _ in range(20):
            numbers.add(writer.payload(memoryview(content)))
    finally:
        ended.set()
        thread.join()
    final = writer.payload(memoryview(content))
    writer.close(1)
    check_capture(path)
    with closing(open_capture(path)) as capture:
        assert {len(capture.payload(number)) for number in numbers} == {length}
        assert bytes(capture.payload(final)) == content.tobytes()
