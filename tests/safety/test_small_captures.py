"""Small captures that mean much work: every tool that runs no code ends soon and in little memory, whatever it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from format.samples import SESSION, Records, op

from replayfmt.format.codes import DType, Layout, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import Device, Kernel, Node, Signature, StreamPlacement, TensorMeta
from replayfmt.format.writer import CaptureWriter

V, K = ValueKind, RecordKind
MOST_BYTES = 400_000  # of a capture here
CPU_S, MEMORY_BYTES = 10, 1 << 30

# Imports once; then each tool runs in a child with these limits, its memory counted from what the imports have mapped.
_TOOLS = f"""
import json, os, resource, sys
import torch, opreplay_tools.check, opreplay_tools.dump, opreplay_tools.export, opreplay_tools.probe
import opreplay_tools.report, opreplay_tools.run
torch.set_num_threads(1)
torch.ones(2) + 1
capture, out = sys.argv[1:]
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for name, arguments in {{
    "check": [capture],
    "dump": [capture],
    "run": ["--device=cpu", capture],
    "report": [capture, "-o", out + "/report.html"],
    "export": [capture, out + "/export.zip"],
    "probe": ["list", capture],
}}.items():
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
        resource.setrlimit(resource.RLIMIT_AS, (mapped + {MEMORY_BYTES},) * 2)
        written = os.open(f"{{out}}/{{name}}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(written, 1), os.dup2(written, 2)
        sys.argv = ["opreplay-" + name, *arguments]
        try:
            getattr(opreplay_tools, name).main()
        finally:
            sys.stdout.flush()
    _, status, used = os.wait4(child, 0)
    print(json.dumps([name, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
"""


class Work:
    """Records of the streams of one accelerator."""

    def __init__(self, path: Path) -> None:
        self.writer = CaptureWriter(path, SESSION)
        self.gpu = self.writer.device(Device("gpu", 0))
        self.records = Records(self.writer)
        meta = self.writer.meta(TensorMeta(DType.float32, Layout.strided, self.gpu, (2,), (1,)))
        self.tensor = self.records.tensor(self.records.storage(8, self.gpu, StorageOrigin.uninitialized), 0, meta)
        look = self.writer.kernel(Kernel("aten::relu_", "default", "aten::relu_(Tensor(a!) self) -> Tensor(a!)"))
        self._op = op(look, (Node(V.tensor, "self"),), (Node(V.tensor),))
        self._of_event = (Node(V.int, "event"), Node(V.device, "device", self.gpu), Node(V.int, "stream"))

    def op(self, stream: int) -> None:
        placement = self.writer.placement(StreamPlacement(((self.gpu, stream),)))
        self.records.add(self._op, (self.tensor, self.tensor), placement=placement, start=0)

    def event(self, kind: RecordKind, event: int, stream: int) -> None:
        self.records.add(Signature(kind, self._of_event), ints=(event, stream), start=0)

    def synchronize(self) -> None:
        self.records.add(Signature(K.synchronize, (Node(V.device, "device", self.gpu),)), start=0)

    def close(self) -> None:
        self.records.write()
        self.writer.close(1)


def many_streams(work: Work) -> None:
    """Each knows how far all the others have come."""
    for stream in range(1, 1001):
        work.op(stream)
        work.event(K.event_record, 1, stream)
        work.event(K.event_wait, 1, stream + 1)


def events_that_know_much(work: Work) -> None:
    """Each event keeps a clock of its own."""
    many_streams(work)
    for event in range(20_000):
        work.op(1000)
        work.event(K.event_record, event, 1000)


def waits_of_streams_that_do_nothing(work: Work) -> None:
    """Streams that only events name."""
    many_streams(work)
    for stream in range(2000, 30_000):
        work.event(K.event_record, 2, stream)
        work.event(K.event_wait, 1 + stream % 2, stream)


def waits_for_all_streams(work: Work) -> None:
    many_streams(work)
    for number in range(10_000):
        work.op(1 + number % 1000)
        work.synchronize()


def rings(work: Work) -> None:
    """Each stream waits for the one before it, round and round."""
    many_streams(work)
    for number in range(20_000):
        work.op(1 + number % 1000)
        work.event(K.event_record, number, 1 + number % 1000)
        work.event(K.event_wait, number, 1 + (number + 1) % 1000)


def streams_on_very_many_devices(work: Work) -> None:
    """One placement that says a stream of each."""
    devices = [work.gpu, *(work.writer.device(Device("gpu", number)) for number in range(1, 2000))]
    placement = work.writer.placement(StreamPlacement(tuple((device, 1) for device in devices[:1000])))
    for _ in range(20_000):
        work.records.add(work._op, (work.tensor, work.tensor), placement=placement, start=0)


def very_many_tensors(work: Work) -> None:
    """Of one list."""
    kernel = work.writer.kernel(Kernel("aten::cat", "default", "aten::cat(Tensor[] tensors, int dim=0) -> Tensor"))
    given = Node(V.list, "tensors", None, (Node(V.tensor),) * 50_000)
    work.records.add(op(kernel, (given,), (Node(V.tensor),)), (work.tensor,) * 50_001, start=0)


def scopes_in_scopes(work: Work) -> None:
    scope = 0
    for number in range(3000):
        scope = work.writer.scope(scope, f"s{number}")
        work.records.add(work._op, (work.tensor, work.tensor), scope=scope, start=0)


def very_many_signatures(work: Work) -> None:
    kernel = work.writer.kernel(Kernel("aten::relu_", "x", "aten::relu_.x(Tensor(a!) self, str x) -> Tensor(a!)"))
    for number in range(5000):
        given = (Node(V.tensor, "self"), Node(V.string, "x", f"x{number}"))
        work.records.add(op(kernel, given, (Node(V.tensor),)), (work.tensor, work.tensor), start=0)


FAMILY: list[Callable[[Work], None]] = [
    events_that_know_much,
    waits_of_streams_that_do_nothing,
    waits_for_all_streams,
    rings,
    streams_on_very_many_devices,
    very_many_tensors,
    scopes_in_scopes,
    very_many_signatures,
]


@pytest.mark.sweep
@pytest.mark.parametrize("write", FAMILY, ids=lambda write: write.__name__)
def test_a_small_capture_takes_no_tool_much_time_or_memory(write: Callable[[Work], None], tmp_path: Path) -> None:
    path = tmp_path / "small.opreplay"
    work = Work(path)
    write(work)
    work.close()
    assert path.stat().st_size < MOST_BYTES
    done = subprocess.run(
        [sys.executable, "-c", _TOOLS, path, tmp_path], capture_output=True, text=True, check=True, timeout=300
    )
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == 6
    for name, code, _cpu_s in ended:
        said = (tmp_path / f"{name}.txt").read_text(errors="replace")
        assert code in (0, 1, 3) and "Traceback" not in said and "MemoryError" not in said, (name, code, said[-2000:])
    if write in FAMILY[:4]:
        assert "races        not all looked for: from ordinal " in (tmp_path / "check.txt").read_text()
