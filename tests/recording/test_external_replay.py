"""What was captured from files replays bit for bit: from the files, or from what was embedded of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from replayfmt.errors import ReplayRefused
from replayfmt.replay.plan import Plan

from .conftest import Capture, Captured
from .external import origins

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not tell of mappings")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "weights.safetensors"
    save_file({name: torch.randn(40, 40, generator=generator) for name in ("up", "down")}, path)
    torch.save(load_file(path), path.with_suffix(".pt"))
    return path


def forward(loaded: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.relu(torch.ones(2, 40) @ loaded["up"]) @ loaded["down"]


def replays_twice(captured: Captured) -> None:
    """From fresh state each time, whatever the ops write."""
    with Plan(captured.path) as plan:
        for _ in range(2):
            result = plan.execute(verify="bitwise")
            assert result.outcome == "ok", str(result.divergence)


@pytest.mark.parametrize("policy", ["reference", "capture-ranges", "capture-all"])
@pytest.mark.parametrize("validation", ["identity", "digest"])
def test_forward_passes_from_mapped_files(capture: Capture, saved: Path, policy: str, validation: str) -> None:
    loaded = load_file(saved)
    captured = capture(lambda: forward(loaded), digests="ops", file_policy=policy, file_validation=validation)
    assert origins(captured) == ["external_file"] * 2
    if policy != "reference":
        saved.unlink()
    replays_twice(captured)


def test_training_writes_to_the_memory_and_not_to_the_file(capture: Capture, saved: Path) -> None:
    archive = saved.with_suffix(".pt")
    before = archive.read_bytes()

    def program() -> Any:
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in torch.load(archive, mmap=True).items()}
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            forward(parameters).sum().backward()
            optimizer.step()
        return parameters

    captured = capture(program, digests="ops")
    assert origins(captured).count("external_file") == 2
    replays_twice(captured)
    assert archive.read_bytes() == before


def test_writes_from_outside_between_ops(capture: Capture, saved: Path) -> None:
    loaded = torch.load(saved.with_suffix(".pt"), mmap=True)
    view = loaded["up"].numpy()

    def program() -> Any:
        first = forward(loaded)
        view[0] = 3.0
        return first, forward(loaded)

    captured = capture(program, digests="ops")
    replays_twice(captured)


def test_copies_of_named_shards(capture: Capture, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, tensor in load_file(saved).items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("up", "down")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    copies = {name: tensor.clone() for name, tensor in load_file(saved).items()}
    captured = capture(lambda: forward(copies), digests="ops", files=[folder])
    assert origins(captured) == ["external_file"] * 2
    replays_twice(captured)


def test_raw_files_of_integers(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.int64).tofile(path)
    tokens = torch.from_file(str(path), shared=False, size=900, dtype=torch.int64)
    captured = capture(lambda: torch.arange(1000)[tokens[5:50]] * 2, digests="ops")
    assert origins(captured) == ["external_file"]
    replays_twice(captured)


def test_a_file_that_the_program_maps_while_it_is_captured(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.int64).tofile(path)

    def program() -> Any:
        tokens = torch.from_file(str(path), shared=False, size=900, dtype=torch.int64)
        return torch.arange(1000)[tokens[5:50]] * 2

    captured = capture(program, digests="ops")
    assert origins(captured) == ["external_file"] and "aten::from_file.default" not in captured.ops()
    replays_twice(captured)


@pytest.mark.slow
def test_a_model_loaded_while_it_is_captured(capture: Capture, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="20KB")

    def program() -> Any:
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        loss = model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss
        loss.backward()
        return model, loss

    captured = capture(program)
    assert origins(captured).count("external_file") > 5 and captured.unsupported() == {}
    captured.replays()


def test_a_file_that_is_replaced_while_it_is_captured_is_in_the_capture(capture: Capture, saved: Path) -> None:
    loaded = load_file(saved)

    def program() -> Any:
        first = forward(loaded)
        other = saved.with_name("other")
        save_file({"up": torch.eye(40), "down": torch.eye(40)}, other)
        other.replace(saved)
        return first

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_a_file_that_is_written_in_place_while_it_is_captured_is_refused(capture: Capture, saved: Path) -> None:
    loaded = load_file(saved)

    def program() -> Any:
        first = forward(loaded)
        with saved.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"another.")
        os.utime(saved, ns=(1, 1))
        return first

    captured = capture(program, digests="ops")
    with pytest.raises(ReplayRefused) as refused:
        Plan(captured.path)
    assert any("file_changed" in finding for finding in refused.value.findings)


def test_a_redacted_reference_needs_to_be_told_where_the_file_is(
    capture: Capture, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_file(saved)
    captured = capture(lambda: forward(loaded), digests="ops", redact=True)
    monkeypatch.chdir("/")
    with pytest.raises(ReplayRefused, match="(?s).*") as refused:
        Plan(captured.path)
    assert any("weights.safetensors" in finding for finding in refused.value.findings)
    with Plan(captured.path, file_remaps=[f"weights.safetensors={saved}"]) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
