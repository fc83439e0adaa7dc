"""The files of measurements that a report is made of: read whole, and refused in one line where they are damaged, of
another schema, or of another capture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from replayfmt.benchmark.comparison.baseline import MOST_NUMBER, Document, read_baseline
from replayfmt.benchmark.energy.report import SCHEMA_VERSION as ENERGY_SCHEMA
from replayfmt.benchmark.same_capture import require_same_capture
from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.regular_files import read_json, require_regular_file

_LONGEST_ROW = 64 << 20


@dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are asked for by name and type. `where` is said in errors."""

    content: Mapping[str, Any]
    where: str

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.content.get(name) is not None

    def text(self, name: str) -> str:
        return self._typed(name, str, "a text")

    def count(self, name: str) -> int:
        value: int = self._typed(name, int, "a whole number")
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise self._wrong(name, "a whole number from 0 to 2^63 - 1")
        return value

    def number(self, name: str) -> float | None:
        """A number of a size that can be calculated with; None if it is null or missing."""
        value = self.content.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_NUMBER:
            raise self._wrong(name, f"a number of at most {MOST_NUMBER:g} or null")
        return float(value) if abs(value) >= 1 / MOST_NUMBER else 0.0

    def amount(self, name: str) -> float | None:
        """A number from 0: a time, bytes, a rate. None if it is null or missing."""
        value = self.number(name)
        if value is not None and value < 0:
            raise self._wrong(name, "a number from 0 or null")
        return value

    def amounts(self, name: str) -> list[float]:
        """A list of numbers from 0, without null."""
        values = {f"{name}[{place}]": each for place, each in enumerate(self._typed(name, list, "a list of numbers"))}
        inside = Fields(values, self.where)
        return [inside._required(inside.amount(each), each) for each in values]

    def _required(self, value: float | None, name: str) -> float:
        if value is None:
            raise self._wrong(name, "a number from 0")
        return value

    def texts(self, name: str) -> list[str]:
        values = self._typed(name, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of texts")
        return list(values)

    def fields(self, name: str) -> Fields:
        return Fields(self._typed(name, dict, "an object"), f"{self.where}: {name}")

    def rows(self, name: str) -> Iterator[Fields]:
        for place, row in enumerate(self._typed(name, list, "a list of objects")):
            if not isinstance(row, dict):
                raise self._wrong(f"{name}[{place}]", "an object")
            yield Fields(row, f"{self.where}: {name}[{place}]")

    def _typed(self, name: str, kind: type, expected: str) -> Any:
        if not isinstance(self.content.get(name), kind):
            raise self._wrong(name, expected)
        return self.content[name]

    def _wrong(self, name: str, expected: str) -> UsageError:
        found = json.dumps(self.content.get(name), default=str)[:60] if name in self.content else "nothing"
        return UsageError(f"{self.where}: {name}: expected {expected}, got {found}; the file is damaged")


def read_benchmark(flag: str, path: str | PathLike[str], reader: CaptureReader) -> Document:
    """A document that opreplay-benchmark --benchmark-out wrote for this capture. Raises UsageError for another one."""
    document = read_baseline(path, flag)
    require_same_capture(f"{flag}={path}", document["context"].get("capture_session"), reader)
    if "comparisons" in document:
        raise UsageError(
            f"{flag}={path}: is a comparison of kernels (--compare), which the report does not show; expected a file "
            "that opreplay-benchmark --benchmark-out wrote without --compare"
        )
    return document


def read_energy(flag: str, path: str | PathLike[str], reader: CaptureReader) -> Fields:
    """A report that opreplay-energy wrote for this capture. Raises UsageError for another one."""
    wanted = f"expected a report that opreplay-energy wrote (schema version {ENERGY_SCHEMA})"
    content = read_json(path, f"{flag}={path}", wanted)
    if not isinstance(content, dict) or "isolated_kernels" not in content:
        raise UsageError(f"{flag}={path}: is not an energy report; {wanted}")
    if content.get("schema_version") != ENERGY_SCHEMA:
        raise UsageError(f"{flag}={path}: has the schema version {content.get('schema_version')!r:.40}; {wanted}")
    found = Fields(content, f"{flag}={path}")
    require_same_capture(found.where, found.fields("context").content.get("capture_session"), reader)
    return found


def read_run(flag: str, path: str | PathLike[str], reader: CaptureReader) -> Fields:
    """The first row that opreplay-run --format=jsonl printed for this capture. Raises UsageError for another one."""
    wanted = "expected what opreplay-run --format=jsonl printed, whose first row has the kind replay"
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            line = file.readline(_LONGEST_ROW + 1)
    except OSError as error:
        raise UsageError(f"{flag}={path}: cannot be read: {error.strerror}") from None
    try:
        content = json.loads(line) if len(line) <= _LONGEST_ROW else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("kind") != "replay":
        raise UsageError(
            f"{flag}={path}: its first line is not such a row; {wanted}: a replay that was refused has none"
        )
    require_same_capture(f"{flag}={path}", content.get("capture_session"), reader)
    return Fields(content, f"{flag}={path}")
