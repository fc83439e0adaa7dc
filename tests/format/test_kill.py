"""A process that is killed in the middle of a capture: everything it was told was written is recovered."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replayfmt.errors import CaptureFailed, InvalidCapture, OutputExists, UsageError
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture

from .reading import read_all
from .samples import write_everything, write_small

# Acknowledges each frame on stdout once `records` has returned, and is killed after a number of acknowledgements or
# wherever it happens to be.
_WRITER = """
import os, sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from format.samples import SESSION, IMPORT, Records, op
from replayfmt.format.writer import CaptureWriter
from replayfmt.format.model import Device, Kernel, Node, TensorMeta
from replayfmt.format.codes import DType, Layout, StorageOrigin, ValueKind as V

writer = CaptureWriter(sys.argv[1], SESSION)
cpu = writer.device(Device("cpu"))
kernel = writer.kernel(Kernel("a::b", "default", "s"))
records = Records(writer)
frame = 0
while True:
    size = (3000, 90_000, 400_000)[frame % 3]
    payload = writer.payload(os.urandom(size))
    meta = writer.meta(TensorMeta(DType.uint8, Layout.strided, cpu, (size, frame), (1, 1)))
    storage = records.storage(size, cpu, StorageOrigin.payload, payload)
    tensor = records.tensor(storage, 0, meta)
    scope = writer.scope(0, f"step {frame}")
    records.add(IMPORT, ints=(storage, payload, 0), scope=scope, start=frame)
    for number in range(50):
        records.add(op(kernel, (Node(V.tensor, "x"), Node(V.int, "n"))), (tensor,), (number,), scope=scope, start=frame)
    records.write()
    frame += 1
    print(frame, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(6))
def test_every_acknowledged_record_of_a_killed_writer_is_recovered(tmp_path: Path, attempt: int) -> None:
    path, out = tmp_path / "a.opreplay", tmp_path / "out.opreplay"
    code = [sys.executable, "-c", _WRITER, str(path), str(Path(__file__).parents[1])]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = 0
        for _ in range(random.Random(attempt).randrange(1, 12)):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    partial = Path(f"{path}.partial")
    assert not path.exists()
    if attempt % 2:  # tear the last frame too, as a power failure would
        with partial.open("r+b") as file:
            file.truncate(partial.stat().st_size - random.Random(attempt).randrange(1, 40))
        acknowledged -= 1
    with pytest.raises(InvalidCapture, match="never closed.*--recover OUT"):
        check_capture(partial)
    _report, left = recover_capture(partial, out)
    assert "never closed" in left
    report = check_capture(out)
    assert report.recovered
    complete, records, _rest = read_all(out)
    assert complete and len(records) >= 51 * acknowledged and len(records) % 51 == 0
    with open_capture(out) as reader, open_capture(partial) as before:
        assert reader.summary.recovered and reader.summary.ended_ns is None
        assert reader.session == before.session
        for ordinal in range(0, len(records), 51):
            number = reader.record(ordinal).argument("payload").id
            assert reader.payload(number) == before.payload(number)


def test_a_recovery_onto_the_capture_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_small(path, close=False).abandon()
    partial = tmp_path / "a.opreplay.partial"
    before = partial.read_bytes()
    with pytest.raises(UsageError, match="onto itself"):
        recover_capture(partial, partial, force=True)
    recover_capture(partial, path)  # the name that the capture would have had
    assert partial.read_bytes() == before
    with pytest.raises(OutputExists, match="--force"):
        recover_capture(partial, path)
    recover_capture(partial, path, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.opreplay", "a.opreplay.partial"]


def test_recovering_a_whole_capture_copies_it(tmp_path: Path) -> None:
    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    write_everything(path)
    _report, left = recover_capture(path, out)
    assert left == ""
    first, second = read_all(path), read_all(out)
    assert first[:2] == second[:2]
    with open_capture(out) as reader:
        assert reader.summary.ended_ns == 21_000_000_000 and reader.summary.recovered


def test_a_failed_recovery_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    write_everything(path)

    def full(_fd: int, _views: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(CaptureFailed, match="disk is full; recovering ends here, and no file is left; "):
        recover_capture(path, out)
    assert [p.name for p in tmp_path.iterdir()] == ["a.opreplay"]
