"""What the recorder's tests share: one thread, a capture maker, and looking at what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from one_thread import one_thread as one_thread

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.replay.plan import Plan
from tests.native_recorder import require_native_recorder

RECORDERS = ("python", "native")


@pytest.fixture(autouse=True, params=RECORDERS)
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds of both recorders, except where a test is marked for one."""
    if request.param == "native":
        require_native_recorder()
    monkeypatch.setenv("OPREPLAY_RECORDER", request.param)
    return request.param


def runs_with(item: pytest.Function) -> bool:
    """Whether a test is run with the recorder it was collected for: with both, as its marker says, or, where it takes
    long and is not about the recorders, with the one that programs meet."""
    marked = [marker.args for marker in item.iter_markers("recorder")]  # of the test, and of its parameters
    if not marked and item.get_closest_marker("slow"):
        marked = [("native",)]
    return all(item.callspec.params["recorder"] in names for names in marked)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and "recorder" in getattr(getattr(item, "callspec", None), "params", {})
        and Path(__file__).parent in item.path.parents
    ]
    left_out = [item for item in here if not runs_with(item)]
    for item in here:
        if item.callspec.params["recorder"] == "python" and item.get_closest_marker("recorder") is None:
            item.add_marker(pytest.mark.slow)  # `make check` runs what is not about the recorders once
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


class Captured:
    """A capture that was made, and shorthands for reading it."""

    def __init__(self, path: Path, returned: Any) -> None:
        self.path = path
        self.returned = returned
        self.opened: list[CaptureReader] = []

    @property
    def reader(self) -> CaptureReader:
        self.opened.append(open_capture(self.path))
        return self.opened[-1]

    def records(self, *kinds: RecordKind) -> list[Record]:
        return [record for record in self.reader.records() if not kinds or record.kind in kinds]

    def ops(self) -> list[str]:
        """The names of the ops, in order."""
        reader = self.reader
        return [reader.kernels[r.signature.kernel].qualified_name for r in self.records(RecordKind.op)]

    def unsupported(self) -> dict[str, int]:
        return self.reader.summary.unsupported

    def replays(self) -> None:
        """Replays bit for bit, with something to compare."""
        with Plan(self.path) as plan:
            result = plan.execute(verify="bitwise")
        assert result.outcome == "ok", str(result.divergence)
        assert result.verification.digests > 0


Capture = Callable[..., Captured]


@pytest.fixture
def capture(tmp_path: Path) -> Iterator[Capture]:
    """Captures what a function does. What it returns is alive until the capture has ended."""
    made: list[Captured] = []
    count = 0

    def make(program: Callable[[], Any], **options: Any) -> Captured:
        nonlocal count
        count += 1
        path = tmp_path / f"{count}.opreplay"
        with replayfmt.capture(path, **options):
            returned = program()
        made.append(Captured(path, returned))
        return made[-1]

    yield make
    for reader in (reader for captured in made for reader in captured.opened):
        reader.close()
