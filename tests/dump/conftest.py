"""Captures that several tests read, made once, and a way to run the tool inside the test's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from opreplay_tools import dump

from . import captures


@pytest.fixture(scope="session")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with every kind of record and value."""
    return captures.every_kind(tmp_path_factory.mktemp("dump") / "every.opreplay")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture without anything unusual: 102 records, 10 a frame."""
    return captures.plain(tmp_path_factory.mktemp("dump") / "plain.opreplay")


@dataclass
class Ran:
    code: int
    output: str
    error: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Ran]:
    """Run opreplay-dump with these arguments."""

    def call(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["opreplay-dump", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            dump.main()
        output, error = capsysbinary.readouterr()
        return Ran(int(left.value.code or 0), output.decode(), error.decode())

    return call
