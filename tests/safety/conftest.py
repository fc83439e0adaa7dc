"""What the tests of safety share: one thread, the tools run in this process, and captures to be changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Done:
    """What a tool printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def findings(self) -> list[str]:
        return [line.strip() for line in self.err.splitlines() if line.startswith("  ")]


Tools = Callable[..., Done]


@pytest.fixture
def tools(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tools:
    """`tools("run", "--flag", path)` runs opreplay-run in this process."""

    def run(name: str, *arguments: Any) -> Done:
        module = importlib.import_module(f"opreplay_tools.{name}")
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", [f"opreplay-{name}", *map(str, arguments)])
            capsys.readouterr()
            with pytest.raises(SystemExit) as left:
                module.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err + printed.out
        return Done(int(left.value.code or 0), printed.out, printed.err)

    return run
