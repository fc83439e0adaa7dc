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
