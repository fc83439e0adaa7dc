"""What a device's allocator counts in a replay. Run by test_accelerator.py after on_device.py, in its process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_process import Tools
from on_device import devices_as_they_were, recorder  # noqa: F401 - fixtures of every test

import replayfmt
from replayfmt import Plan
from replayfmt.pytorch.tensors import digests, long_content
from replayfmt.pytorch.tensors.digests import digest_tensor, hash_tensor
from replayfmt.pytorch.tensors.memory import undispatched


def test_the_peak_of_a_devices_memory_is_measured_or_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        x = torch.ones(1 << 16, device="sim:0")
        (x + 1).sum().item()
    with Plan(path) as plan:
        peaks = {each.device: each for each in plan.execute(verify="bitwise").memory}
    assert 2 * 4 << 16 <= peaks["sim:0"].peak_bytes < 8 * 4 << 16
    monkeypatch.delattr(torch.sim, "reset_peak_memory_stats")  # type: ignore[attr-defined]
    with Plan(path) as plan:
        peak = {each.device: each for each in plan.execute(verify="bitwise").memory}["sim:0"]
    assert peak.peak_bytes is None and "reports no peak" in peak.note


def test_the_memory_of_a_capture_is_what_the_devices_allocator_counts_in_a_replay(tmp_path: Path, tools: Tools) -> None:
    path = tmp_path / "a.opreplay"
    weight = torch.ones(1 << 10, device="sim:1")
    with replayfmt.capture(path), replayfmt.scope("execute"):
        x = torch.ones(8, 1 << 10, device="sim:1")
        for _ in range(4):
            x = x * weight + 1
        x.sum().item()
    del x, weight  # the allocator counts the replay's memory alone
    done = tools("benchmark", "--memory", "--benchmark-format=json", "--benchmark-min-time=1x", path)
    assert done.code == 0, done.err
    memory = json.loads(done.out)["memory"]
    (captured,) = (each for each in memory["captured"] if each["device"] == "sim:1")
    (measured,) = (each for each in memory["measured"] if each["device"] == "sim:1")
    assert captured["peak_bytes"] == (2 * 8 + 1) * 4 << 10
    assert measured["allocator_peak_bytes"] == captured["peak_bytes"]
    assert measured["allocator_minus_captured_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("kilobytes", [1, 300, 3000])
def test_a_digest_of_a_devices_tensor_is_the_hosts_however_large_it_is_and_however_it_lies(
    dtype: torch.dtype, kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONG_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(long_content, name, 1 << 20)
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1 << 20)
    rows = (kilobytes << 10) // (100 * dtype.itemsize)
    host = torch.randn(rows, 10, 10).mul(3).to(dtype)
    there = host.to("sim:0")
    for view in (lambda t: t, lambda t: t.permute(2, 0, 1), lambda t: t[:, 3:7], lambda t: t[1::2, :, 5]):
        with undispatched():
            found, expected = digest_tensor(view(there)), digest_tensor(view(host))
            assert hash_tensor(view(there)) == (expected.hash_low, expected.hash_high)
        for name in ("hash_low", "hash_high", "elements", "nan", "inf", "min", "max", "sample"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.mean == pytest.approx(expected.mean) and found.l2 == pytest.approx(expected.l2)


def test_digests_take_no_more_of_a_devices_memory_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1 << 16)
    there = torch.randn(1000, 1000, device="sim:1").t()
    torch.sim.reset_peak_memory_stats(1)  # type: ignore[attr-defined]
    before = torch.sim.max_memory_allocated(1)  # type: ignore[attr-defined]
    with undispatched():
        digest_tensor(there)
        hash_tensor(there)
    assert torch.sim.max_memory_allocated(1) - before <= 2 << 16  # type: ignore[attr-defined]


def test_a_long_digest_is_made_on_the_host_where_a_device_has_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONG_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(long_content, name, 1 << 16)
    host = torch.randn(1 << 16)
    there = host.to("sim:0")
    with undispatched():
        digest_tensor(there)  # the constants are there

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("sim: out of memory")

        monkeypatch.setattr(long_content, "chunk_hashes", full)
        expected = digest_tensor(host)
        assert digest_tensor(there).hex == expected.hex
        assert hash_tensor(there) == (expected.hash_low, expected.hash_high)


def test_a_long_digest_takes_no_more_of_a_devices_memory_than_twelve_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_content, "LONG_BYTES", 1 << 16)
    monkeypatch.setattr(long_content, "PIECE_BYTES", 1 << 16)
    there = torch.randn(1 << 20, device="sim:1").to(torch.int8)
    torch.sim.reset_peak_memory_stats(1)  # type: ignore[attr-defined]
    before = torch.sim.max_memory_allocated(1)  # type: ignore[attr-defined]
    with undispatched():
        digest_tensor(there)
    assert torch.sim.max_memory_allocated(1) - before <= 12 << 16  # type: ignore[attr-defined]


def test_what_a_program_writes_after_a_scope_does_not_reach_the_digests_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1 << 12)
    path = tmp_path / "a.opreplay"
    other = torch.Stream("sim:0")
    with replayfmt.capture(path):
        with replayfmt.scope("step"):
            x = torch.arange(100_000.0, device="sim:0") * 2
            y = x[: 100_000 - 1 : 3] + 1
        x.zero_()
        y.zero_()
        other.wait_stream(torch.accelerator.current_stream())
        with other, replayfmt.scope("aside"):
            z = x + 3
        z.record_stream(other)
        torch.accelerator.current_stream().wait_stream(other)
        z.zero_()
    with Plan(path) as plan:
        result = plan.execute(verify="bitwise")
    assert result.outcome == "ok" and result.verification.digests >= 3
