"""The folder of a run: `event.log`, `kernel/<n>_<hash>/` for each kernel, `result/<seconds>.bin` for each launch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from replayfmt.errors import CaptureNotFound

_KERNEL = re.compile(r"(\d+)_(\w+)$")
_RESULT = re.compile(r"\d+\.\d+\.bin$")


@dataclass(frozen=True)
class TraceFolder:
    """What a run's folder has. `kernels` by number; `results` by time, the earliest first. Unknown names are left
    out."""

    path: Path
    event_log: Path | None
    tensors: Path | None
    kernels: tuple[Path, ...]
    results: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TraceFolder:
        """Look into a folder. Raises CaptureNotFound where it is none, or has none of these files."""
        folder = Path(path)
        if not folder.is_dir():
            raise CaptureNotFound(f"{folder}: is not a directory; expected the folder of a run")
        try:
            kernels = [each for each in _inside(folder / "kernel") if _KERNEL.match(each.name) and each.is_dir()]
            results = [each for each in _inside(folder / "result") if _RESULT.match(each.name)]
        except PermissionError as error:
            raise CaptureNotFound(f"{error.filename}: {error.strerror}") from None
        log, tensors = folder / "event.log", folder / "tensor.trace"
        found = cls(
            folder,
            log if log.is_file() else None,
            tensors if tensors.is_file() else None,
            tuple(sorted(kernels, key=lambda each: int(each.name.partition("_")[0]))),
            tuple(sorted(results, key=lambda each: float(each.stem))),
        )
        if not (found.event_log or found.kernels or found.results):
            raise CaptureNotFound(f"{folder}: has no event.log, kernel/ or result/; expected the folder of a run")
        return found


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
