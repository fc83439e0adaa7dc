"""The windows of a measurement of energy, and their file: what ran when.

One JSON object a line: a header (`kind: header`), a line for each window, and `kind: end` with their number, so that
a file that was cut off is recognized. Times are UTC in nanoseconds since 1970, and monotonic ones: the length of
a window is by the latter, and a window whose two lengths differ was measured while the clock was being set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NoReturn, get_args

from replayfmt.errors import UsageError
from replayfmt.format.regular_files import require_regular_file

from ..gpu_state import are_gpu_rows

FORMAT = "opreplay-energy-windows"
VERSION = 1
Role = Literal["idle", "whole", "scope", "op", "restore", "program"]
_MOST_DRIFT_NS = 50_000_000
_DAY_S = 24 * 60 * 60
_MOST = 2**63 - 1


@dataclass(frozen=True)
class EnergyWindow:
    """`runs` times the same work (idle: 0). `count` is how often the model calls it; `restore` is the work that puts
    back what the op of the same name writes, whose energy is in the op's window, too."""

    role: Role
    name: str
    runs: int
    start_utc_ns: int
    end_utc_ns: int
    start_monotonic_ns: int
    end_monotonic_ns: int
    count: int = 1
    kernel: str = ""
    kernel_class: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_monotonic_ns - self.start_monotonic_ns) / 1e9

    @property
    def start_s(self) -> float:
        return self.start_utc_ns / 1e9

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True)
class WindowsFile:
    """The content of a file. `context` says what was measured and where; `utc_offset_s` is the zone of the machine;
    `not_run` are the ops without a window, each with its calls and the reason."""

    context: dict[str, Any]
    utc_offset_s: int
    windows: list[EnergyWindow]
    not_run: list[dict[str, Any]]

    def lines(self) -> Iterable[str]:
        yield json.dumps(
            {
                "kind": "header",
                "format": FORMAT,
                "version": VERSION,
                "utc_offset_s": self.utc_offset_s,
                "context": self.context,
                "not_run": self.not_run,
            }
        )
        yield from (json.dumps({"kind": "window", **asdict(window)}) for window in self.windows)
        yield json.dumps({"kind": "end", "windows": len(self.windows)})

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines())


def read_windows(path: str | os.PathLike[str]) -> WindowsFile:
    """Read a file of windows. Raises UsageError for one that is damaged, cut off, or something else, and for windows
    during which the clock was set."""
    try:
        require_regular_file(path)
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line, parse_constant=_no_number) for line in file if line.strip()]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not a file of windows: not every line of it is JSON") from error
    if not rows or not all(isinstance(row, dict) for row in rows) or rows[0].get("format") != FORMAT:
        raise UsageError(f"{path}: is not a file of windows; expected what opreplay-benchmark --energy-windows wrote")
    head, *body = rows
    if head.get("version") != VERSION:
        raise UsageError(f"{path}: has version {head.get('version')!r} of windows; this reader knows {VERSION}")
    if not body or body[-1].get("kind") != "end" or body[-1].get("windows") != len(body) - 1:
        raise UsageError(f"{path}: is cut off: measure again with --energy-windows")
    context, not_run = head.get("context"), head.get("not_run")
    offset_s = head.get("utc_offset_s")
    if not isinstance(context, dict) or not isinstance(offset_s, int) or abs(offset_s) >= _DAY_S:
        raise UsageError(f"{path}: its header is damaged")
    if not isinstance(not_run, list) or not all(isinstance(each, dict) and _is_not_run(each) for each in not_run):
        raise UsageError(f"{path}: its header is damaged: the work that was not run")
    if not are_gpu_rows(context.get("gpus", [])):
        raise UsageError(f"{path}: its header is damaged: the states of the GPUs")
    windows = [_window(row, str(path)) for row in body[:-1]]
    _require_forward(windows, str(path))
    return WindowsFile(context, offset_s, windows, not_run)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_not_run(each: dict[str, Any]) -> bool:
    named = all(isinstance(each.get(name, ""), str) for name in ("role", "name", "kernel"))
    return named and isinstance(each.get("reason"), str) and _is_count(each.get("count", 0))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _require_forward(windows: list[EnergyWindow], path: str) -> None:
    """Raises UsageError if a window begins before the one that ran before it ended."""
    ordered = sorted(windows, key=lambda each: each.start_monotonic_ns)
    for before, after in zip(ordered, ordered[1:], strict=False):
        early_s = max(
            (before.end_monotonic_ns - after.start_monotonic_ns) / 1e9,
            (before.end_utc_ns - after.start_utc_ns - _MOST_DRIFT_NS) / 1e9,
        )
        if early_s > 0:
            raise UsageError(
                f"{path}: the window of {after.name} begins {early_s:.3f} s before that of {before.name} ends: the "
                "clock was set back between them; measure again"
            )


def _window(row: dict[str, Any], path: str) -> EnergyWindow:
    kinds = {field.name: str if field.type == "str" else int for field in fields(EnergyWindow) if field.name != "role"}
    values = {name: row.get(name) for name in kinds}
    right = all(
        isinstance(values[name], str) if kind is str else _is_count(values[name]) for name, kind in kinds.items()
    )
    if not right or row.get("role") not in get_args(Role):
        raise UsageError(f"{path}: a window of it is damaged: {json.dumps(row)[:120]}")
    window = EnergyWindow(role=row["role"], **{name: values[name] for name in kinds})  # type: ignore[arg-type]
    utc, monotonic = window.end_utc_ns - window.start_utc_ns, window.end_monotonic_ns - window.start_monotonic_ns
    if monotonic <= 0:
        raise UsageError(f"{path}: the window of {window.name} does not end after it begins")
    if abs(utc - monotonic) > _MOST_DRIFT_NS:
        raise UsageError(
            f"{path}: the clock was set during the window of {window.name}: it took {utc / 1e9:.3f} s by the time of "
            f"day and {monotonic / 1e9:.3f} s by the monotonic clock; measure again"
        )
    return window
