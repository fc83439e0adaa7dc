"""A capture of `program.py`, and tasks of its kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import Tool as Tool

from replayfmt.dump.selection import OpSelection
from replayfmt.export.kernel_task import write_task
from replayfmt.export.task_workloads import TaskOptions
from replayfmt.replay.plan import Plan

HERE = Path(__file__).parent
Exported = Callable[..., Path]


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "step.opreplay"
    command = [sys.executable, "-m", "opreplay_tools.capture", "-o", str(path), str(HERE / "program.py")]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="session")
def exported(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Writes a task of the capture, or of another one; the same one only once."""
    known: dict[object, Path] = {}

    def export(
        source: Path | None = None,
        *,
        ops: str | None = None,
        kernel: str | None = None,
        scope: str | None = None,
        **options: object,
    ) -> Path:
        key = (source, ops, kernel, scope, *sorted(options.items()))
        if key not in known:
            known[key] = tmp_path_factory.mktemp("task") / "task"
            wanted = OpSelection(ops, scope and (scope,), kernel and (kernel,))
            with Plan(source or capture, keep_going=True, allow_code=True) as plan:
                write_task(plan, str(known[key]), wanted, TaskOptions(**options))  # type: ignore[arg-type]
        return known[key]

    return export
