"""How many processes run the tests is what processors and memory allow, and what `make` is told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import workers

from .test_tree import ROOT

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine of 4 processors and 64 GiB of free memory. `limit` and `quota` are files that a container has."""
    made = SimpleNamespace(processors=4, free=64 * GIB, limit=tmp_path / "memory.max", quota=tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(made.processors)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=made.free))
    monkeypatch.setattr(workers, "_MEMORY_LIMITS", (made.limit, tmp_path / "none"))
    monkeypatch.setattr(workers, "_PROCESSOR_QUOTA", made.quota)
    return made


def test_there_is_a_worker_for_each_processor_but_not_for_every_one_of_a_large_machine(
    machine: SimpleNamespace,
) -> None:
    assert workers.workers() == 4
    machine.processors = 64
    assert workers.workers() == 8


def test_there_are_no_more_workers_than_there_is_memory_for(machine: SimpleNamespace) -> None:
    machine.free = 7 * GIB
    assert workers.workers() == 3
    machine.limit.write_text(f"{5 * GIB}\n")
    assert workers.workers() == 2
    machine.limit.write_text("max\n")
    assert workers.workers() == 3


def test_where_there_is_room_for_one_worker_pytest_runs_the_tests_itself(machine: SimpleNamespace) -> None:
    machine.free = 3 * GIB
    assert workers.workers() == 0
    machine.free, machine.processors = 64 * GIB, 1
    assert workers.workers() == 0


def test_the_processors_of_a_container_count(machine: SimpleNamespace) -> None:
    machine.quota.write_text("250000 100000\n")
    assert workers.workers() == 2
    machine.quota.write_text("max 100000\n")
    assert workers.workers() == 4


def test_workers_share_the_processors(machine: SimpleNamespace) -> None:
    assert [workers.threads_of_a_worker(count) for count in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 1]


@pytest.mark.parametrize(("told", "passed"), [([], "-n auto"), (["WORKERS=0"], "-n 0"), (["WORKERS=3"], "-n 3")])
@pytest.mark.parametrize("target", ["test", "check"])
def test_make_is_told_how_many_workers_there_are(target: str, told: list[str], passed: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("WORKERS", "MAKEFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(
        ["make", "--dry-run", target, *told],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=kept,
        timeout=600,
    )
    assert f" -m pytest {passed} " in done.stdout
