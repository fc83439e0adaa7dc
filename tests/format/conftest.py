"""What the tests of the format share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from .samples import write_everything


class Ran(NamedTuple):
    code: int
    output: str
    error: str


Run = Callable[..., Ran]


@pytest.fixture()
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    from opreplay_tools.check import main

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["opreplay-check", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(int(leaving.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.opreplay"
    write_everything(path)
    return path
