"""Generated code whose calls were seen is recorded without Python, and says what the complete path says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import TensorValue
from replayfmt.format.reader import open_capture
from replayfmt.recording.capture_session import CaptureSession
from tests.native_recorder import require_native_recorder
from tests.recording.test_unwritten import leave_behind

from .conftest import Capture, Captured

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def native() -> None:
    require_native_recorder()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels whose calls took the complete path."""
    seen: list[str] = []
    before = CaptureSession.before

    def counted(self: CaptureSession, kernel: Any, *arguments: Any) -> Any:
        seen.append(kernel.name)
        return before(self, kernel, *arguments)

    monkeypatch.setattr(CaptureSession, "before", counted)
    return seen


def told(captured: Captured) -> list[tuple[Any, ...]]:
    """What the records say, apart from times and the deaths of storages; storages by the order in which they come."""
    storages: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, TensorValue):
            return value.meta, value.offset, storages.setdefault(value.storage, len(storages))
        return [plain(item) for item in value] if isinstance(value, (tuple, list)) else repr(value)

    with open_capture(captured.path) as reader:
        return [
            (
                record.kind,
                reader.kernels[record.signature.kernel].qualified_name,
                plain(record.args),
                plain(record.results),
            )
            if record.kind is RecordKind.op
            else (record.kind, [node.constant for node in record.signature.args])
            for record in reader.records()
            if record.kind not in (RecordKind.storage_release, RecordKind.digest)
        ]


def layers() -> Callable[[], Any]:
    """Library calls into allocated memory, and memory that several tensors of one kernel fill."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16)

    def work(x: Tensor) -> Tensor:
        joined = torch.cat([x[:1] * 2, x.sin()])
        return second(F.gelu(first(joined))) + joined

    f, x = torch.compile(work), torch.randn(5, 16)

    def run() -> Tensor:
        with torch.no_grad():
            return f(x)

    return run


def step() -> Callable[[], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    f, update, x = torch.compile(model), torch.compile(adamw.step), torch.randn(5, 8)

    def run() -> list[Tensor]:
        f(x).pow(2).mean().backward()
        update()
        adamw.zero_grad()
        return [each.detach().clone() for each in model.parameters()]

    return run


@pytest.mark.parametrize("make", [layers, step], ids=lambda make: make.__name__)
def test_calls_that_were_seen_take_no_python_and_their_records_are_the_same(
    make: Callable[[], Callable[[], Any]], capture: Capture, cold: list[str]
) -> None:
    run = make()
    run()

    def program() -> Any:
        for _ in range(4):
            cold.clear()
            returned = run()
        return returned

    hot = capture(program, recorder="native")
    # The first call after a change of settings takes the complete path, and what uses its result: a forward pass that
    # is to be differentiated runs without gradients.
    assert [name for name in cold if not name.startswith("aten::")] == []
    assert cold == [] or make is step
    assert cold.count("aten::empty_strided") < 2
    assert hot.unsupported() == []
    hot.replays()
    complete = capture(program, digests="ops")  # never on the hot path
    assert len(cold) > 4
    assert told(hot) == told(complete)


def test_memory_that_nothing_wrote_is_not_taken_for_that_of_generated_code(capture: Capture) -> None:
    """A kernel that adds to an argument reads it, whoever allocated it."""
    f = torch.compile(lambda x, total: total.add_(x.sin()))
    x, total = torch.randn(8), torch.zeros(8)
    f(x, total)

    def program(fresh: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: [f(x, fresh()) for _ in range(4)]

    written = capture(program(lambda: torch.empty(8).fill_(1)))
    assert written.unsupported() == []
    written.replays()
    read = capture(program(lambda: torch.empty(8)))
    assert read.unsupported() == []
    read.replays()  # with what was in that memory


@pytest.mark.parametrize("recorder", ["native", "python"])
@pytest.mark.parametrize("allocates", [lambda x: x, torch.compile], ids=["program", "region"])
def test_what_a_kernel_leaves_as_it_was_of_memory_from_outside_replays(
    allocates: Callable[..., Any], recorder: str, capture: Capture
) -> None:
    """A cache that is allocated once, by the program or by another region, and filled slot by slot by compiled code."""
    empty = allocates(lambda n: torch.empty(n, 4))
    empty(8)
    f = torch.compile(lambda cache, at, x: cache.index_copy_(0, at, x))
    slots = [torch.tensor([at]) for at in range(4)]
    f(torch.zeros(8, 4), slots[0], torch.ones(1, 4))

    def program() -> list[Tensor]:
        caches = []
        for _ in range(4):
            leave_behind(7.5)
            caches.append(empty(8))
            for slot in slots:
                f(caches[-1], slot, torch.ones(1, 4))
        return caches

    found = capture(program, recorder=recorder)
    assert found.unsupported() == []
    found.replays()


def test_a_kernel_that_raises_and_one_in_another_thread_are_recorded_as_ever(capture: Capture) -> None:
    import threading

    f, x = torch.compile(lambda x: x.sin() * 2 + x.cos().sum()), torch.randn(8)
    f(x)

    def program() -> list[Tensor]:
        found = [f(x) for _ in range(3)]
        thread = threading.Thread(target=lambda: found.extend(f(x) for _ in range(3)))
        thread.start()
        thread.join()
        return [*found, f(x)]

    captured = capture(program)
    assert all(torch.equal(each, captured.returned[0]) for each in captured.returned)
    assert len([name for name in captured.kernels() if name.startswith("cpp_fused")]) == 7 * len(
        {name for name in captured.kernels() if name.startswith("cpp_fused")}
    )
    captured.replays()
