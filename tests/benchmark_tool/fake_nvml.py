"""An NVML without a GPU: pynvml's functions, which zeus calls, answer for boards that are made up.

`install` replaces them in this process; `for_processes` in those that start from now on.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pynvml


@dataclass
class Board:
    """What a board says; None: it is not supported. `lost_after` reads of power the board is lost."""

    watts: float | None = 70.0
    counts: bool = True
    lost_after: int | None = None
    sm_mhz: int | None = 1500
    memory_mhz: int | None = 1200
    celsius: int | None = 40
    limit_watts: float | None = 300.0
    reasons: int | None = 0

    def power(self):
        if self.lost_after is not None:
            self.lost_after -= 1
            if self.lost_after < 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(
            nvmlReturn=pynvml.NVML_SUCCESS if self.watts is not None else pynvml.NVML_ERROR_NOT_SUPPORTED,
            value=SimpleNamespace(uiVal=int((self.watts or 0) * 1e3)),
        )


def _said(value):
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


def install(boards, replace=setattr):
    """`replace(module, name, value)` puts a function in place, as monkeypatch.setattr does."""

    def not_supported(*_arguments):
        return _said(None)

    clocks = {pynvml.NVML_CLOCK_SM: "sm_mhz", pynvml.NVML_CLOCK_MEM: "memory_mhz"}
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": lambda index: boards[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: boards[int(str(uuid).rpartition("-")[2])],
        "nvmlDeviceGetName": lambda board: "Made-up GPU",
        "nvmlDeviceGetC2cModeInfoV": not_supported,
        "nvmlDeviceGetArchitecture": lambda board: pynvml.NVML_DEVICE_ARCH_VOLTA - (0 if board.counts else 1),
        "nvmlDeviceGetFieldValues": lambda board, _fields: [board.power()],
        "nvmlDeviceGetTotalEnergyConsumption": lambda board: int(_said(board.watts) * time.monotonic() * 1e3),
        "nvmlDeviceGetClockInfo": lambda board, kind: _said(getattr(board, clocks[kind])),
        "nvmlDeviceGetTemperature": lambda board, _sensor: _said(board.celsius),
        "nvmlDeviceGetPowerManagementLimit": lambda board: int(_said(board.limit_watts) * 1e3),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda board: _said(board.reasons),
    }
    for name, function in functions.items():
        assert hasattr(pynvml, name), name
        replace(pynvml, name, function)


def for_processes(folder, monkeypatch, boards):
    """Processes that start from now on find these boards."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport fake_nvml\nfake_nvml.install_told()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("MADE_UP_BOARDS", json.dumps([asdict(board) for board in boards]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install_told():
    """In such a process."""
    sys.modules.setdefault("fake_nvml", sys.modules[__name__])
    install([Board(**board) for board in json.loads(os.environ["MADE_UP_BOARDS"])])
