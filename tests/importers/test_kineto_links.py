"""Which operator each kernel of a trace is given to, by whatever ids its exporter wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import CaptureFailed

from .conftest import Import, Imported
from .traces import ADD, MM, kernel, launch, op, tensor, trace

RELU = [tensor("float", 4, 3)]


def rocm(number: int, start: float, *, name: str = "hipLaunchKernel", thread: int = 1) -> dict[str, Any]:
    """A launch as ROCm builds export it that write no correlation."""
    event = launch(0, start, name=name, thread=thread, external=number)
    del event["args"]["correlation"]
    return event


def ran(number: int | None, start: float, duration: float, name: str = "gemm") -> dict[str, Any]:
    """A kernel of such an export."""
    event = kernel(0, start, duration, name)
    del event["args"]["correlation"]
    if number is not None:
        event["args"]["External id"] = number
    return event


def times(result: Imported) -> list[tuple[str, int | None]]:
    return [(name, record.device_duration_ns) for name, record in zip(result.ops, result.of("op"), strict=True)]


def told(result: Imported, *words: str) -> bool:
    return any(all(word in line for word in words) for line in (*result.report.problems, *result.report.notes))


def test_launches_are_linked_by_external_ids_of_their_own(imported: Import) -> None:
    # The launch inside of aten::mm has the number 2, which is the external id of aten::relu.
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=1),
            rocm(2, 12),
            ran(2, 50, 5),
            op("aten::relu", 100, 20, RELU, external=2),
            rocm(3, 105),
            ran(3, 150, 7),
            op("aten::add", 200, 20, ADD, external=3),
        ]
    )
    assert times(result) == [("aten::mm.default", 5_000), ("aten::relu.default", 7_000)]


def test_launches_are_linked_by_the_external_ids_of_operators(imported: Import) -> None:
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=1),
            rocm(1, 11, name="hipGetDevicePropertiesR0600"),
            rocm(1, 12),
            rocm(1, 14, name="hipExtModuleLaunchKernel"),
            ran(1, 50, 5),
            ran(1, 60, 6),
            op("aten::relu", 100, 20, RELU, external=2),
            rocm(2, 105),
            ran(2, 150, 7),
        ]
    )
    assert times(result) == [("aten::mm.default", 11_000), ("aten::relu.default", 7_000)]
    assert not result.report.problems


def test_a_graph_is_told_from_what_else_has_its_external_id(imported: Import) -> None:
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=1),
            rocm(1, 12),
            ran(1, 50, 5),
            rocm(9, 100, name="hipGraphLaunch"),
            rocm(9, 104, name="hipStreamIsCapturing"),
            ran(9, 150, 7),
            ran(9, 160, 8),
        ]
    )
    assert times(result) == [("aten::mm.default", 5_000)]
    (record,) = result.of("unsupported")
    assert record.argument("reason") == "cuda_graph" and record.device_duration_ns == 15_000


def test_a_launch_on_a_thread_of_another_number_is_linked_by_the_operators_id(imported: Import) -> None:
    result = imported([op("aten::mm", 10, 20, MM, external=1), rocm(1, 12, thread=77), ran(1, 50, 5)])
    assert times(result) == [("aten::mm.default", 5_000)]


def test_a_launch_outside_of_the_operator_that_has_its_id_is_not_linked_to_it(imported: Import) -> None:
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=1),
            rocm(1, 12),
            ran(1, 50, 5),
            op("aten::relu", 100, 20, RELU, external=2),
            rocm(2, 500),
            ran(2, 550, 7, "stray"),
        ]
    )
    assert times(result) == [("aten::mm.default", 5_000)]
    (record,) = result.of("unsupported")
    assert (record.argument("reason"), record.argument("op")) == ("outside_operator", "stray")


def test_work_whose_launch_is_missing_is_not_linked_by_ids_that_are_no_operators(imported: Import) -> None:
    # Launches are numbered on their own, as the first two show: operator 3 did not launch what has the number 3.
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=1),
            rocm(2, 12),
            ran(2, 50, 5),
            op("aten::relu", 100, 20, RELU, external=2),
            op("aten::add", 200, 20, ADD, external=3),
            ran(3, 150, 7),
        ]
    )
    assert times(result) == [("aten::mm.default", 5_000)]
    assert told(result, "1 events of device work have the external id of an operator", "linked to none")
    assert told(result, "1 pieces of device work were launched before the trace began")


def test_correlations_of_zero_are_none(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 20, MM, external=1),
        launch(0, 12, external=4),
        kernel(0, 50, 5, **{"External id": 4}),
        op("aten::relu", 100, 20, RELU, external=2),
        launch(0, 105, external=5),
        kernel(0, 40, 7, **{"External id": 5}),
    ]
    assert times(imported(events)) == [("aten::mm.default", 5_000), ("aten::relu.default", 7_000)]


def test_correlations_that_do_not_tell_launches_apart_are_not_what_links(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 20, MM, external=1),
        launch(7, 12, external=4),
        kernel(7, 250, 5, **{"External id": 4}),
        op("aten::relu", 100, 20, RELU, external=2),
        launch(7, 105, external=5),
        kernel(7, 260, 7, **{"External id": 5}),
    ]
    assert times(imported(events)) == [("aten::mm.default", 5_000), ("aten::relu.default", 7_000)]


def test_kernels_without_any_id_are_an_unsupported_record(imported: Import) -> None:
    result = imported(
        [op("aten::mm", 10, 20, MM, external=1), rocm(1, 12), ran(1, 50, 5), ran(None, 60, 7), ran(None, 70, 8)]
    )
    assert times(result) == [("aten::mm.default", 5_000)]
    (record,) = result.of("unsupported")
    assert "2 kernels and copies have neither" in str(record.argument("detail")) and record.device_duration_ns == 15_000


def test_an_import_that_takes_nothing_though_there_are_kernels_fails(imported: Import, tmp_path: Path) -> None:
    events = [op("aten::mm", 10, 20, MM, external=1), ran(None, 50, 5), kernel(88, 60, 6)]
    with pytest.raises(CaptureFailed, match="none of its 2 kernels .* level leaf"):
        imported(events)
    assert not (tmp_path / "out.opreplay").exists()
    assert imported(events, level="leaf").ops == ["aten::mm.default"]
    with pytest.raises(CaptureFailed, match="nothing is taken at level launching$"):
        imported(trace(tmp_path / "kernels.json", events[1:]))
