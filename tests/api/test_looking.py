"""A capture from Python: slices of its ops, their times, tables of them, and what a notebook shows."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dump import captures

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.export.tables import COLUMNS, op_column_frames

from .conftest import NAME


def test_ops_are_a_sequence_and_a_mapping_by_ordinal(small: Path) -> None:
    with replayfmt.open(small) as capture:
        every = list(capture.ops.by_ordinal)
        assert [op.ordinal for op in capture.ops] == [op.ordinal for op in capture.ops[:]] == every
        assert len(capture.ops) == len(capture.ops.by_ordinal) == len(every)
        assert capture.ops[0].ordinal == every[0] and capture.ops[-1].ordinal == every[-1]
        assert [op.ordinal for op in capture.ops[2:9:3]] == every[2:9:3] and capture.ops[10_000:] == []
        assert capture.ops.by_ordinal[every[3]].kernel == capture.ops[3].kernel
        with pytest.raises(IndexError):
            capture.ops[len(every)]


def test_a_time_that_was_not_measured_is_none_and_never_zero(small: Path, tmp_path: Path) -> None:
    untimed = captures.plain(tmp_path / "plain.opreplay")
    with replayfmt.open(small) as timed, replayfmt.open(untimed) as capture:
        assert all(op.duration_ns > 0 for op in timed.ops if op.duration_ns is not None)
        assert any(op.duration_ns is not None for op in timed.ops)
        for op in capture.ops:
            assert op.duration_ns == op.record.duration_ns and op.device_duration_ns == op.record.device_duration_ns
        times = [each["device_duration_ns"] for each in op_column_frames(timed.reader)]
        assert all(mask.all() for _table, mask in times) and sum(len(mask) for _table, mask in times) == len(timed.ops)


def test_columns_say_what_records_say(small: Path, tmp_path: Path) -> None:
    for path in (small, captures.every_kind(tmp_path / "every.opreplay")):
        with replayfmt.open(path) as capture:
            rows = (
                (columns, place) for columns in op_column_frames(capture.reader) for place in range(len(columns["op"]))
            )
            for op, (columns, place) in zip(capture.ops, rows, strict=True):
                assert tuple(columns) == COLUMNS
                record = op.record
                said = tuple(
                    columns[name][place] for name in ("ordinal", "op", "overload", "scope", "thread", "status")
                )
                expected = (op.ordinal, op.kernel.name, op.kernel.overload, op.scope, record.thread)
                assert said == (*expected, record.signature.status.name)
                assert columns["start_ns"][0][place] == record.start_ns
                for name in ("duration_ns", "device_duration_ns"):
                    values, missing = columns[name]
                    assert (None if missing[place] else values[place]) == getattr(op, name)
                devices = {str(each) for each in capture.reader.devices[1:]}
                assert not columns["device"][place] or str(columns["device"][place]) in devices


def test_to_pandas_gives_the_columns_with_missing_times(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, because pandas need not be installed."""

    class DataFrame(dict[str, Any]):
        def set_index(self, name: str) -> DataFrame:
            return DataFrame(self, index=name)

    stand_in = ModuleType("pandas")
    stand_in.DataFrame = DataFrame  # type: ignore[attr-defined]
    stand_in.arrays = SimpleNamespace(IntegerArray=lambda values, mask: (values, mask))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    with replayfmt.open(small) as capture:
        table: Any = capture.to_pandas()
        assert table["index"] == "ordinal" and list(table)[:-1] == list(COLUMNS)
        assert table["ordinal"].tolist() == list(capture.ops.by_ordinal)
        values, mask = table["duration_ns"]
        assert values.dtype == np.int64 and mask.dtype == bool


@pytest.mark.slow
def test_to_pandas_gives_a_data_frame_where_pandas_is_installed(small: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with replayfmt.open(small) as capture:
        table = capture.to_pandas()
        assert list(table.index) == list(capture.ops.by_ordinal)
    assert table["device_duration_ns"].isna().all() and table["duration_ns"].dtype == pandas.Int64Dtype()
    assert set(table["scope"]) == {NAME}


@pytest.mark.slow
def test_without_pandas_there_is_one_error_that_says_what_to_install(small: Path) -> None:
    code = f"""
import sys
sys.modules["pandas"] = None
import replayfmt
try:
    replayfmt.open({str(small)!r}).to_pandas()
except replayfmt.OpReplayError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "to_pandas() needs pandas, which is not installed: pip install 'opreplay[pandas]'\n"
    assert issubclass(OpReplayError, Exception)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.guarantee("notebook")
def test_a_notebook_shows_the_summary_and_the_kernels_and_nothing_of_a_capture_is_markup(
    small: Path, tmp_path: Path
) -> None:
    for path in (small, captures.every_kind(tmp_path / "hostile.opreplay")):
        with replayfmt.open(path) as capture:
            page = Tags()
            page.feed(capture._repr_html_())
            assert page.tags <= {"table", "thead", "tbody", "tr", "th", "td", "p"}
            text = "\n".join(page.texts)
            assert capture.session.producer in text
            assert capture.kernels[0].qualified_name in text or path != small
            if path == small:
                assert NAME in text and "aten::native_batch_norm.default" in text
