"""Memory outside of a storage: tensors are compared with their memory again wherever that may have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failure.table import recorded
from format.reseal import change_records
from in_process import Tools
from replay.rewriting import rewrite

from replayfmt.errors import InvalidCapture, OpReplayError, ReplayFailed, ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.format.reader import open_capture
from replayfmt.pytorch.tensors.composites import put_together
from replayfmt.pytorch.tensors.memory import require_inside, undispatched
from replayfmt.replay.plan import Plan


def _resized(source: Path, target: Path, length: int) -> Path:
    """Every resize makes the storage this long."""

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.storage_resize:
            ints[1] = length

    return rewrite(source, target, change=change)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    def program() -> Any:
        base = torch.arange(4096.0)
        view = base.view(64, 64)[1:]
        base.untyped_storage().resize_(32768)
        return view + 1, base * 2, torch.ones(3).exp()

    return recorded(tmp_path, program, "source", digests="ops")


@pytest.mark.guarantee("views")
@pytest.mark.parametrize("length", [0, 16, 16_000])
def test_a_storage_that_shrinks_under_live_views_ends_the_use_of_those_views(
    source: Path, tmp_path: Path, length: int
) -> None:
    path = _resized(source, tmp_path / "shrunk.opreplay", length)
    for verify in ("auto", "none"):
        with Plan(path) as plan, pytest.raises(ReplayFailed, match="needs .* bytes of a storage that has"):
            plan.execute(verify=verify)  # type: ignore[arg-type]
    with Plan(path, keep_going=True) as plan:
        result = plan.execute(verify="auto", keep_going=True)
    assert result.verdicts is not None
    assert [verdict.verdict for verdict in result.verdicts].count("ok") == len(result.verdicts) - 2
    assert result.verdicts[-1].verdict == "ok", "what does not use that memory goes on"


def test_a_program_that_frees_memory_under_a_view_and_takes_it_back_replays(tmp_path: Path) -> None:
    def program() -> Any:
        weight = torch.arange(64.0)
        view = weight.view(8, 8)
        storage = weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(256)
        weight.fill_(3)
        return view.t() @ view

    with Plan(recorded(tmp_path, program)) as plan:
        assert plan.execute(verify="auto").outcome == "ok"


@pytest.mark.guarantee("views")
@pytest.mark.parametrize("length", [-1, -(2**63), 2**61])
def test_lengths_that_no_storage_has_are_refused_when_they_are_read(
    source: Path, tmp_path: Path, tools: Tools, length: int
) -> None:
    with open_capture(source) as reader:
        before = next(record.args[1] for record in reader.records() if record.kind is RecordKind.storage_resize)
    path = tmp_path / "hostile.opreplay"
    path.write_bytes(source.read_bytes())

    def edit(columns: dict[str, Any]) -> None:
        columns["ints"] = columns["ints"].copy()
        columns["ints"][columns["ints"] == before] = length

    change_records(path, edit)
    with pytest.raises(InvalidCapture, match="bytes of storage_resize holds"):
        Plan(path)
    assert tools("check", path).code == 3


def test_a_resize_to_more_memory_than_there_is_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayRefused, match="1 reason") as refused:
        Plan(_resized(source, tmp_path / "grown.opreplay", 2**50))
    assert "bytes of memory" in refused.value.findings[0]


@pytest.mark.guarantee("views")
def test_a_view_made_without_a_check_is_checked(tmp_path: Path) -> None:
    source = recorded(tmp_path, lambda: torch.ops.aten._reshape_alias.default(torch.ones(16), [4, 4], [4, 1]).exp())

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.op and len(ints) == 4:
            ints[:] = [2**20, 2**10, 2**10, 1]

    with Plan(source) as plan:
        assert plan.execute(verify="auto").outcome == "ok"
    path = rewrite(source, tmp_path / "hostile.opreplay", change=change)
    with Plan(path) as plan, pytest.raises(ReplayFailed, match="needs .* bytes of a storage that has"):
        plan.execute()
    with Plan(path, keep_going=True) as plan:
        assert plan.execute(keep_going=True).totals()["failed"] == 1


def test_a_nested_tensor_made_without_a_check_is_checked(tmp_path: Path) -> None:
    """Gradients of programs on nested tensors come from such an operator."""
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])

    def program() -> Any:
        buffer, sizes, strides = nested.values(), nested._nested_tensor_size(), nested._nested_tensor_strides()
        view = torch.ops.aten._nested_view_from_buffer.default
        return view(buffer, sizes, strides, torch.arange(0, 12, 6)).unbind()

    source = recorded(tmp_path, program)
    with Plan(source) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.op and ints[:3] == [0, 12, 6]:
            ints[:3] = [0, 2**41, 2**40]

    path = rewrite(source, tmp_path / "hostile.opreplay", change=change)
    with Plan(path) as plan, pytest.raises(ReplayFailed, match="lies outside of its buffer"):
        plan.execute()


@pytest.mark.guarantee("views")
def test_an_op_that_raised_leaves_no_tensor_that_is_longer_than_its_memory(tmp_path: Path) -> None:
    """An out= argument gets its new sizes first, and then the memory is not there."""
    out, big = torch.empty(0), torch.empty(1).expand(2**44)

    def program() -> Any:
        with contextlib.suppress(RuntimeError):
            torch.ops.aten.add.out(big, 1, out=out)
        return torch.ops.aten.fill_.Scalar(out, 1.0) if out.numel() < 9 else None

    path = recorded(tmp_path, program)
    for keep_going in (False, True):
        try:
            with Plan(path, keep_going=keep_going) as plan:
                plan.execute(keep_going=keep_going)
        except OpReplayError:
            pass
    broken = torch.empty(4)
    broken.untyped_storage().resize_(4)
    with undispatched(), pytest.raises(RuntimeError, match="needs 16 bytes of a storage that has 4"):
        require_inside([broken])


def _parts() -> dict[str, tuple[Any, ...]]:
    return {
        "sparse_coo": (torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), True),
        "sparse_csr": (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2)),
        "sparse_csc": (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2)),
        # Not in order, and one twice: 2 rows and 3 columns (of blocks), of which a kernel may use all.
        "sparse_csr unordered": (torch.tensor([0, 4, 4]), torch.tensor([2, 0, 2, 1]), torch.ones(4), (2, 3)),
        "sparse_csc unordered": (torch.tensor([0, 0, 1, 4]), torch.tensor([1, 1, 0, 1]), torch.ones(4), (2, 3)),
        "sparse_bsr unordered": (torch.tensor([0, 4, 4]), torch.tensor([2, 0, 2, 1]), torch.ones(4, 2, 1), (4, 3)),
        "sparse_bsc unordered": (torch.tensor([0, 0, 1, 4]), torch.tensor([1, 1, 0, 1]), torch.ones(4, 1, 2), (2, 6)),
        "quantized_per_channel": (
            torch.ones(2, 3, dtype=torch.int8),
            torch.qint8,
            torch.ones(2, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            0,
        ),
        "nested": (torch.arange(6.0), torch.tensor([[2], [4]]), torch.tensor([[1], [1]]), torch.tensor([0, 2])),
    }


BROKEN: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("sparse_coo", 0, lambda indices: indices + 2**40),
    ("sparse_coo", 0, lambda indices: indices - 5),
    ("sparse_coo", 1, lambda values: torch.ones(1)),
    ("sparse_coo", 2, lambda sizes: (1, 1)),
    ("sparse_coo", 0, lambda indices: indices[:1]),
    ("sparse_csr", 1, lambda plain: plain + 2**40),
    ("sparse_csr", 0, lambda rows: rows * 1000),
    ("sparse_csr", 2, lambda values: values[:1]),
    ("sparse_csc", 0, lambda rows: -rows),
    ("sparse_csr unordered", 1, lambda plain: plain + 1),
    ("sparse_csc unordered", 1, lambda plain: plain + 1),
    ("sparse_bsr unordered", 1, lambda plain: plain + 1),
    ("sparse_bsc unordered", 1, lambda plain: plain + 1),
    ("sparse_csr unordered", 1, lambda plain: plain - 1),
    ("sparse_csr unordered", 0, lambda rows: rows * torch.tensor([1, 2, 1])),
    ("sparse_csc unordered", 0, lambda columns: columns + 1),
    ("sparse_bsr unordered", 0, lambda rows: rows + torch.tensor([0, 0, 1])),
    ("quantized_per_channel", 2, lambda scales: scales[:1]),
    ("quantized_per_channel", 4, lambda axis: 7),
    ("quantized_per_channel", 4, lambda axis: -3),
    ("quantized_per_channel", 4, lambda axis: 1),
    ("nested", 1, lambda sizes: sizes * 1000),
    ("nested", 3, lambda offsets: offsets + 2**62),
    ("nested", 3, lambda offsets: offsets - 9),
    ("nested", 2, lambda strides: strides * 2**62),
    ("nested", 1, lambda sizes: -sizes),
    ("nested", 3, lambda offsets: offsets[:1]),
    ("nested", 1, lambda sizes: sizes[:1].expand(2, 1)),
    ("nested", 0, lambda buffer: buffer[:1].expand(6)),
]


@pytest.mark.guarantee("composite-tensors")
@pytest.mark.parametrize(("form", "place", "change"), BROKEN, ids=range(len(BROKEN)))
def test_tensors_made_of_others_are_checked_before_a_kernel_sees_them(
    form: str, place: int, change: Callable[[Any], Any]
) -> None:
    parts = list(_parts()[form])
    form = form.split()[0]
    with undispatched():
        assert put_together(form, parts) is not None
        parts[place] = change(parts[place])
        with pytest.raises(ValueError, match="nested|sparse|quantized"):
            put_together(form, parts)
