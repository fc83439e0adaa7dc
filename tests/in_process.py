"""Tools run in the process of the test, as their console scripts would be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from opreplay_tools.__main__ import TOOLS


class Ran(NamedTuple):
    """How a tool ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def findings(self) -> list[str]:
        return [line.strip() for line in self.err.splitlines() if line.startswith("  ")]


Tool = Callable[..., Ran]
Tools = Callable[..., Ran]


@pytest.fixture
def tools(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tools:
    """`tools("run", "--flag", path)` runs opreplay-run."""

    def run(name: str, *arguments: object) -> Ran:
        module = importlib.import_module(f"opreplay_tools.{TOOLS[name]}")
        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", [f"opreplay-{name}", *map(str, arguments)])
            capsys.readouterr()
            with pytest.raises(SystemExit) as left:
                module.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err + out
        return Ran(int(left.value.code or 0), out, err)

    return run


@pytest.fixture
def trim_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """opreplay-trim replays its result in this process, too. (tests/trim/test_opaque_results.py shows that it starts
    another one, and what it says where that does not survive.)"""

    def check(path: str, flags: Any) -> Any:
        from replayfmt.trim.trimming import checked_here

        return checked_here(flags.plan)(path, flags.verify)

    monkeypatch.setattr("opreplay_tools.trim.check_apart", check)
