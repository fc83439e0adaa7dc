"""An op's inputs and results: from the capture itself where it holds them, else from a verified replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replay.rewriting import rewrite

import replayfmt
from replayfmt.api import Op
from replayfmt.errors import (
    ContentNotCaptured,
    ExternalFileProblem,
    InvalidCapture,
    OpReplayError,
    ReplayMismatch,
    ReplayRefused,
    UsageError,
)


def op_of(capture: replayfmt.Capture, name: str, number: int = 0) -> Op:
    return [op for op in capture.ops if op.kernel.name == name][number]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.layout == other.layout and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_inputs_that_came_from_outside_are_in_the_capture(small: Path) -> None:
    with replayfmt.open(small) as capture:
        inputs = op_of(capture, "aten::addmm").inputs()
    assert list(inputs) == ["self", "mat1", "mat2"]
    assert torch.equal(inputs["mat1"], torch.arange(16.0).reshape(2, 8))
    assert inputs["mat2"].shape == (8, 4) and inputs["mat2"].stride() == (1, 8)


def test_what_an_op_computed_is_refused_with_its_name_and_computed_on_demand(small: Path) -> None:
    with replayfmt.open(small) as capture:
        norm, first = op_of(capture, "aten::native_batch_norm"), op_of(capture, "aten::addmm")
        with pytest.raises(
            ContentNotCaptured,
            match=rf"input: the capture does not hold its content: ordinal "
            rf"{first.ordinal} \(aten::addmm.default\) wrote it",
        ):
            norm.inputs()
        with pytest.raises(ContentNotCaptured, match="result 0: .*this op computed it; replay=True computes it"):
            first.results()
        (sums,) = first.results(replay=True)
        taken = norm.inputs(replay=True)
        given = first.inputs()
    assert torch.equal(sums, torch.addmm(given["self"], given["mat1"], given["mat2"]))
    assert torch.equal(taken["input"], sums)
    assert taken["training"] is True and taken["momentum"] == 0.1


def test_what_an_op_writes_without_saying_so_is_not_taken_for_what_was_captured(small: Path) -> None:
    """batch_norm's schema does not say that it writes the running statistics."""
    with replayfmt.open(small) as capture:
        before = op_of(capture, "aten::native_batch_norm")
        after = op_of(capture, "aten::native_batch_norm", 1)
        with pytest.raises(ContentNotCaptured, match="native_batch_norm"):
            after.inputs()
        mean = before.inputs(replay=True)["running_mean"]
        assert not torch.equal(after.inputs(replay=True)["running_mean"], mean)


def test_inputs_of_an_op_in_place_are_those_before_it_and_results_those_after(small: Path) -> None:
    with replayfmt.open(small) as capture:
        op = op_of(capture, "aten::add_", 1)  # the first counts batch norm's batches
        before, (after,) = op.inputs(), op.results(replay=True)
        with pytest.raises(ContentNotCaptured, match="this op computed it"):
            op.results()
        with pytest.raises(ContentNotCaptured, match=r"ordinal \d+ \(aten::add_.Tensor\) wrote it"):
            op_of(capture, "aten::relu").inputs()
    assert torch.equal(before["self"], torch.arange(16.0).reshape(2, 8)) and torch.equal(after, before["self"] + 1)


def test_numbers_and_views_on_captured_memory_are_results_that_a_capture_holds(small: Path) -> None:
    with replayfmt.open(small) as capture:
        (number,) = op_of(capture, "aten::_local_scalar_dense").results()
        weight = op_of(capture, "aten::t")
        (view,), inputs = weight.results(), weight.inputs()
    assert isinstance(number, float)
    assert torch.equal(view, inputs["self"].t())


@pytest.mark.slow
def test_every_op_gives_the_same_from_the_capture_and_from_a_replay(small: Path) -> None:
    held = 0
    with replayfmt.open(small) as capture:
        for op in capture.ops:
            for of in ("inputs", "results"):
                computed = getattr(op, of)(replay=True)
                try:
                    there = getattr(op, of)()
                except ContentNotCaptured:
                    continue
                pairs = (
                    zip(there.values(), computed.values(), strict=True)
                    if of == "inputs"
                    else zip(there, computed, strict=True)
                )
                assert all(same(one, other) for one, other in pairs), (op, of)
                held += 1
    assert held > 8


def test_tensors_that_share_memory_share_it_here_too(small: Path) -> None:
    with replayfmt.open(small) as capture:
        op = op_of(capture, "aten::cat")
        for inputs in (op.inputs(), op.inputs(replay=True)):
            one, other = inputs["tensors"]
            one.add_(1)
            assert torch.equal(one, other)
        assert not torch.equal(op.inputs()["tensors"][0], one)


def test_composite_tensors_are_put_together(small: Path) -> None:
    with replayfmt.open(small) as capture:
        (sparse,) = op_of(capture, "aten::_to_sparse").results(replay=True)
    assert sparse.layout is torch.sparse_coo and torch.equal(sparse.to_dense(), torch.eye(3))


def test_an_import_that_fails_is_said_before_anything_is_computed(small: Path) -> None:
    with replayfmt.open(small) as capture:
        op = op_of(capture, "aten::cat")
        for allowed in ("nothere", ["torch", "nothere"]):
            for values in (op.inputs, op.results):
                with pytest.raises(ReplayRefused) as refused:
                    values(replay=True, allow_imports=allowed)
                (finding,) = refused.value.findings
                assert finding.startswith("--allow-import=nothere: it cannot be imported: ModuleNotFoundError")
        assert op.results(replay=True, allow_imports="torch")


def test_content_that_was_left_out_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "none.opreplay"
    weight = torch.ones(2, 2)
    with replayfmt.capture(path, payload="none"):
        weight.mm(weight)
    with replayfmt.open(path) as capture:
        op = op_of(capture, "aten::mm")
        with pytest.raises(ContentNotCaptured, match=r"self: its content was left out of the capture \(payload=none\)"):
            op.inputs()
        assert op.inputs(replay=True)["self"].shape == (2, 2)


def test_work_that_nobody_saw_may_have_written_what_was_captured_before_it(tmp_path: Path) -> None:
    path = tmp_path / "unseen.opreplay"
    weight = torch.ones(2, 2)
    with replayfmt.capture(path):
        weight.mm(weight)
        torch.ones(2, dtype=torch.uint64).fill_(2**63 + 1)  # a number that is not recorded
        weight.relu()
    with replayfmt.open(path) as capture:
        assert op_of(capture, "aten::mm").inputs()["self"].shape == (2, 2)
        with pytest.raises(ContentNotCaptured, match="the work of the unsupported record at ordinal"):
            op_of(capture, "aten::relu").inputs()


def test_content_in_a_file_is_read_from_it_as_long_as_it_is_the_same_file(tmp_path: Path) -> None:
    raw, path = tmp_path / "weights.bin", tmp_path / "file.opreplay"
    raw.write_bytes(bytes(range(64)))
    weight = torch.from_file(str(raw), dtype=torch.uint8, size=64)
    with replayfmt.capture(path):
        weight.add(1)
    moved = raw.rename(tmp_path / "moved.bin")
    with replayfmt.open(path) as capture:
        op = op_of(capture, "aten::add")
        with pytest.raises(ExternalFileProblem, match="self: external file .*weights.bin.*--replay-file-remap"):
            op.inputs()
        inputs = op.inputs(file_remaps=[f"{raw}={moved}"])
    assert inputs["self"].tolist() == list(range(64))


def test_options_of_a_replay_are_refused_without_one(small: Path) -> None:
    with replayfmt.open(small) as capture, pytest.raises(UsageError, match="devices: .*give replay=True"):
        op_of(capture, "aten::addmm").inputs(devices=["cpu"])


def test_an_op_that_raised_has_no_results(tmp_path: Path) -> None:
    path = tmp_path / "raised.opreplay"
    with replayfmt.capture(path):
        with pytest.raises(RuntimeError):
            torch.ones(2, 3).mm(torch.ones(2, 3))
        torch.ones(1)
    with replayfmt.open(path) as capture:
        op = op_of(capture, "aten::mm")
        with pytest.raises(ContentNotCaptured, match=f"ordinal {op.ordinal} raised"):
            op.results()


def test_nothing_is_taken_from_a_replay_that_differs(small: Path, tmp_path: Path) -> None:
    changed = rewrite(
        small,
        tmp_path / "changed.opreplay",
        payload=lambda number, content: bytes([content[0] ^ 1]) + content[1:] if number == 1 else content,
    )
    with replayfmt.open(changed) as capture:
        op = op_of(capture, "aten::native_batch_norm")
        with pytest.raises(ReplayMismatch, match="nothing can be taken from it: ordinal"):
            op.inputs(replay=True)
        with pytest.raises(UsageError, match="substitutions"):
            op.inputs(replay=True, substitutions=["aten::mm=mine.py"])


def test_a_tensor_beyond_its_memory_is_one_clear_error(small: Path, tmp_path: Path) -> None:
    for name, change in (("offset", {"tensor_offset": 10**6}), ("length", {"storage_bytes": 1 << 40})):
        changed = rewrite(small, tmp_path / f"{name}.opreplay", **change)  # type: ignore[arg-type]
        with replayfmt.open(changed) as capture:
            op = op_of(capture, "aten::addmm")
            if name == "offset":
                with pytest.raises(InvalidCapture, match="self: "):
                    op.inputs()
            else:
                assert torch.equal(op.inputs()["mat1"], torch.arange(16.0).reshape(2, 8)), "payloads have their length"
            with pytest.raises(OpReplayError):
                op.inputs(replay=True)
