"""Captures that several tests read, made once, and the tool run inside the test's process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from in_process import Tool, Tools

from . import captures


@pytest.fixture(scope="session")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with every kind of record and value."""
    return captures.every_kind(tmp_path_factory.mktemp("dump") / "every.opreplay")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture without anything unusual: 102 records, 10 a frame."""
    return captures.plain(tmp_path_factory.mktemp("dump") / "plain.opreplay")


@pytest.fixture
def run(tools: Tools) -> Tool:
    """Runs opreplay-dump in this process."""
    return partial(tools, "dump")
