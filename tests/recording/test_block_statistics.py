"""Statistics of digests computed in C++ are NumPy's to the last bit, and nobody meets the threads that compute them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import TensorDigest
from replayfmt.format.reader import open_capture
from replayfmt.native import watching
from replayfmt.native.building import NotAvailable
from replayfmt.pytorch.tensors import digests
from replayfmt.pytorch.tensors.digests import BLOCK_ELEMENTS, BlockStatistics, Totals, digest_tensor

from .conftest import Capture

STATE = watching.thread_watch("auto").state

pytestmark = [
    pytest.mark.recorder("python"),  # of no recorder at all
    pytest.mark.skipif(STATE != "native", reason=f"no library can be built here ({STATE})"),
]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
SIZES = [
    1,
    7,
    8,
    9,
    127,
    128,
    129,
    135,
    136,
    137,
    1000,
    BLOCK_ELEMENTS - 1,
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS + 1,
    131_211,
]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t[:120_000].view(300, -1).t(),
    "one of three columns": lambda t: t[:120_000].view(-1, 3)[:, 1],
    "expanded": lambda t: t[:150].view(3, 1, 50).expand(3, 4, 50),
    "the same element": lambda t: t[:1].expand(1000),
    "long rows": lambda t: t[:131_000].view(1, -1)[:, 3:70_000],
}


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockStatistics:
    """The library, with so many threads for any number of elements."""
    monkeypatch.setattr(digests, "_LONG", 0)
    monkeypatch.setattr(digests, "_threads", lambda count: request.param)
    return BlockStatistics()


def digest(tensor: torch.Tensor, native: BlockStatistics | None) -> TensorDigest:
    digests._recent.clear()
    digests._older.clear()
    before, digests._native = digests._native, native
    try:
        return digest_tensor(tensor)
    finally:
        digests._native = before


def assert_same(tensor: torch.Tensor, native: BlockStatistics) -> None:
    found, expected = digest(tensor, native), digest(tensor, None)
    assert found.slots()[0] == expected.slots()[0]
    assert np.array(found.slots()[1]).tobytes() == np.array(expected.slots()[1]).tobytes(), (found, expected)


def floats(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Numbers of all kinds: large and small, negative, subnormal, infinite, no number, and of all bits."""
    generator = torch.Generator().manual_seed(3)
    elements = max(SIZES)
    normal = torch.randn(elements, generator=generator, dtype=torch.float64)
    for scale in (1.0, 300.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal):
        yield (normal * scale).to(dtype)
    yield normal.relu().to(dtype)
    yield normal.relu().neg().to(dtype)
    yield (normal * 0).to(dtype)  # both zeros, and nothing else
    yield torch.full([elements], -0.0, dtype=dtype)
    yield normal.to(dtype).index_fill_(0, torch.arange(0, elements, 997), math.nan)
    yield normal.relu().to(dtype).index_fill_(0, torch.arange(5, 70_000), -math.inf)  # whole blocks of infinities
    yield torch.randint(256, [elements * dtype.itemsize], generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_of_floats_c_plus_plus_finds_what_numpy_finds(native: BlockStatistics, dtype: torch.dtype) -> None:
    for tensor in floats(dtype):
        for size in SIZES:
            assert_same(tensor[-size:], native)
        for layout in LAYOUTS.values():
            assert_same(layout(tensor), native)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_of_integers_c_plus_plus_finds_what_numpy_finds(native: BlockStatistics, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randint(256, [max(SIZES) * dtype.itemsize], generator=generator, dtype=torch.uint8).view(dtype)
    for size in SIZES:
        assert_same(tensor[:size], native)
    for layout in LAYOUTS.values():
        assert_same(layout(tensor), native)


def added(native: BlockStatistics, tensor: torch.Tensor) -> int:
    """How many elements of a float32 tensor are added in C++."""
    return native.add(Totals(), tensor.data_ptr(), tensor.numel(), "f")


def test_c_plus_plus_leaves_to_numpy_what_depends_on_its_order(native: BlockStatistics) -> None:
    tensor = torch.rand(4 * BLOCK_ELEMENTS) + 1
    assert added(native, tensor) == tensor.numel()
    tensor[3 * BLOCK_ELEMENTS - 2] = -0.0
    assert added(native, tensor) == tensor.numel()
    tensor[3 * BLOCK_ELEMENTS - 9] = 0.0  # which zero is the lowest
    assert added(native, tensor) == 2 * BLOCK_ELEMENTS
    assert_same(tensor, native)
    if torch.set_flush_denormal(True):  # what counts as zero
        try:
            assert added(native, torch.ones(5)) == 0
            assert_same(torch.randn(70_000) * 1e-38, native)
        finally:
            torch.set_flush_denormal(False)


def test_many_elements_are_shared_among_the_threads_that_pytorch_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    work = digests._BLOCKS_A_THREAD * BLOCK_ELEMENTS
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        found = [digests._threads(count) for count in (1, 2 * work - 1, 2 * work, 3 * work, 1000 * work)]
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 2, 3, 4]


def test_without_the_library_the_digests_are_the_same_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> BlockStatistics:
        raise NotAvailable("the compiler failed", "no space")

    tensor = torch.randn(100_000)
    expected = digest(tensor, BlockStatistics())
    monkeypatch.setattr(digests, "_native", None)
    monkeypatch.setattr(digests, "BlockStatistics", missing)
    digests.use_native.__wrapped__()
    assert digests._native is None and digest(tensor, digests._native) == expected
    assert capsys.readouterr().err == "opreplay: digests take longer in this process (the compiler failed: no space)\n"


def test_a_library_that_does_not_add_up_as_numpy_does_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_order(doubles: np.ndarray) -> float:
        return float(np.cumsum(doubles)[-1])

    monkeypatch.setattr(digests, "_native", None)
    monkeypatch.setattr(digests, "_sum", in_order)
    digests.use_native.__wrapped__()
    assert digests._native is None
    assert "this NumPy does not add up as the library in C++ does" in capsys.readouterr().err
    monkeypatch.undo()
    digests.use_native.__wrapped__()
    assert digests._native is not None


def test_a_capture_does_not_meet_the_threads(
    native: BlockStatistics, monkeypatch: pytest.MonkeyPatch, capture: Capture
) -> None:
    monkeypatch.setattr(digests, "_native", native)
    captured = capture(lambda: torch.arange(5.0 * BLOCK_ELEMENTS).mul(3).sum(), digests="ops")
    assert captured.unsupported() == {}
    assert {record.thread for record in captured.records(RecordKind.op)} == {0}
    assert len(captured.records(RecordKind.digest)) >= 3
    captured.replays()


FORKING = """
import os, signal, sys, threading
import torch
import replayfmt
from replayfmt.pytorch.tensors import digests

digests._LONG, digests._threads = 0, lambda count: 3
torch.set_num_threads(1)
numbers = torch.arange(1 << 21, dtype=torch.float32)
turns = threading.Semaphore(0)

def maximum():
    return digests.statistics(numbers.numpy().view("u4"), digests.DType.float32)[3]

def work():
    numbers.add(-1)  # what PyTorch does once and a child would wait for
    for number in range(8):
        turns.release()
        numbers.add(number)

with replayfmt.capture(sys.argv[1], digests="ops"):
    assert digests._native is not None and maximum()
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(8):
        turns.acquire()
        child = os.fork()
        if not child:
            signal.alarm(240)
            os._exit(0 if maximum() == (1 << 21) - 1 else 1)
        print("child:", os.waitpid(child, 0)[1])
    thread.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_forked_while_digests_are_computed_waits_for_none_of_the_threads(tmp_path: Path) -> None:
    path = tmp_path / "forking.opreplay"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.stdout.splitlines() == ["child: 0"] * 8, run.stderr
    with open_capture(path) as opened:
        kinds = [record.signature.kind for record in opened.records()]
        assert opened.summary.unsupported == {"child_work": 8}
    assert kinds.count(RecordKind.digest) >= 8
