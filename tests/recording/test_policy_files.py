"""File policies and validation: what of a known file a capture holds, and what it is recognized by."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayfmt.errors import CaptureFailed, UsageError
from replayfmt.format import external_files as external
from replayfmt.format.external_files import digest_file
from replayfmt.recording.content import first_content
from replayfmt.recording.options import CaptureOptions

from .conftest import Capture, Captured
from .external import origins, payload_bytes, range_bytes, ranges

Weights = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(30, 30, generator=generator) for name in ("up", "down", "unused")}


@pytest.fixture
def saved(weights: Weights, tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    return path


def program(weights: Weights) -> Any:
    def run() -> torch.Tensor:
        anonymous = torch.ones(2, 30, requires_grad=True).detach()
        return anonymous @ weights["up"] @ weights["down"] + torch.tensor([4.0])

    return run


def policies(captured: Captured) -> dict[str, Any]:
    with captured.reader as reader:
        return reader.session.policies


def test_copies_of_named_files_are_referred_to(capture: Capture, saved: Path, weights: Weights) -> None:
    captured = capture(program(weights), files=[saved])
    assert origins(captured).count("external_file") == 2
    assert range_bytes(captured) == [raw(weights["up"]), raw(weights["down"])]
    assert policies(captured)["file-policy"] == "reference"
    assert policies(captured)["file-validation"] == "identity"


def test_without_naming_it_a_copy_is_embedded(capture: Capture, saved: Path, weights: Weights) -> None:
    assert "external_file" not in origins(capture(program(weights)))


def test_shards_are_found_by_their_index(capture: Capture, weights: Weights, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    places = {}
    for number, name in enumerate(weights):
        places[name] = f"model-{number}.safetensors"
        save_file({name: weights[name]}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    captured = capture(program(copies), files=[folder])
    assert [os.path.basename(file.path) for file, _ in ranges(captured)] == list(places.values())[:2]


def test_a_pretrained_model_refers_to_its_checkpoint(capture: Capture, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        captured = capture(lambda: model(tokens).logits, files=[tmp_path / "model"])
    stored = {place.bytes for _, place in ranges(captured)}
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == stored
    assert len(ranges(captured)) >= len(list(model.parameters()))


def test_ranges_can_be_embedded(capture: Capture, saved: Path, weights: Weights) -> None:
    for loaded, files in ((weights, [saved]), (load_file(saved), [])):
        captured = capture(program(loaded), files=files, file_policy="capture-ranges")
        assert origins(captured).count("external_file") == 2
        found = ranges(captured)
        with captured.reader as reader:
            assert [bytes(reader.payload(place.payload)) for _, place in found] == range_bytes(captured)
        assert not any(file.payload for file, _ in found)
        assert raw(weights["unused"]) not in payload_bytes(captured)
    saved.write_bytes(b"")  # nobody needs it any more


def test_a_whole_file_can_be_embedded_once(capture: Capture, saved: Path, weights: Weights) -> None:
    captured = capture(program(weights), files=[saved], file_policy="capture-all")
    found = ranges(captured)
    assert {file for file, _ in found} == {found[0][0]} and found[0][0].payload
    with captured.reader as reader:
        assert bytes(reader.payload(found[0][0].payload)) == saved.read_bytes()
    assert not any(place.payload for _, place in found)


@pytest.mark.slow
def test_embedding_a_file_takes_no_memory_of_its_size(capture: Capture, tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        file.truncate(256 << 20)
    mapped = torch.from_file(str(path), shared=False, size=1 << 20)
    tracemalloc.start()
    try:
        captured = capture(lambda: mapped[:10] + 1, file_policy="capture-all")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert ranges(captured)[0][0].bytes == 256 << 20


def test_an_embedded_file_may_change_meanwhile(capture: Capture, saved: Path) -> None:
    def run() -> Any:
        result = program(loaded)()
        saved.unlink()
        return result

    for policy in ("capture-ranges", "capture-all"):
        save_file({"up": torch.eye(30), "down": torch.eye(30)}, saved)
        loaded = load_file(saved)
        assert capture(run, file_policy=policy).unsupported() == {}


def test_known_files_can_be_forbidden(capture: Capture, saved: Path, weights: Weights) -> None:
    loaded = load_file(saved)
    with pytest.raises(CaptureFailed) as failed:
        capture(program(loaded), file_policy="fail")
    assert str(saved) in str(failed.value) and "3600 bytes" in str(failed.value)
    with pytest.raises(CaptureFailed, match="weights.safetensors"):
        capture(program(weights), files=[saved], file_policy="fail")
    anonymous = {name: tensor * 2 for name, tensor in weights.items()}
    assert set(origins(capture(program(anonymous), files=[saved], file_policy="fail"))) == {"payload"}


def test_zeros_are_not_taken_for_those_of_a_forbidden_file(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "counters.safetensors"
    save_file({"batches": torch.zeros(1, dtype=torch.int64)}, path)
    counter = torch.zeros(1, dtype=torch.int64)
    assert origins(capture(lambda: counter + 1, files=[path], file_policy="fail")) == ["payload"]
    assert origins(capture(lambda: counter + 1, files=[path])) == ["external_file"]


def test_the_program_goes_on_where_a_known_file_is_forbidden(saved: Path, tmp_path: Path) -> None:
    import replayfmt

    loaded = load_file(saved)
    with pytest.raises(CaptureFailed), replayfmt.capture(tmp_path / "c.opreplay", file_policy="fail") as recorder:
        result = program(loaded)()
        assert recorder.failure is not None
    assert torch.equal(result, program(loaded)())
    assert not (tmp_path / "c.opreplay").exists()


def test_a_digest_is_taken_once_for_each_file(
    capture: Capture, saved: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(external, "_TICK_NS", -(1 << 62))  # files are as young as the test
    monkeypatch.setattr(external, "digest_file", lambda *args: read.append(args) or digest_file(*args))
    loaded = load_file(saved)
    for _ in range(2):
        captured = capture(program(loaded), file_validation="digest")
        assert {file.digest for file, _ in ranges(captured)} == {digest_file(saved)}
    assert len(read) == 1
    assert policies(captured)["file-validation"] == "digest"


def test_digests_of_large_files_are_taken_in_parallel_without_stopping_the_capture(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that hash must not wait for the lock of the recorder, which waits for them."""
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        file.truncate(200 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    mapped = torch.from_file(str(path), shared=False, size=1 << 20)
    before = set(threading.enumerate())
    captured = capture(lambda: mapped[:10] + 1, file_validation="digest")
    assert ranges(captured)[0][0].digest == digest_file(path)
    assert set(threading.enumerate()) <= before


def test_a_file_that_changed_before_it_was_digested_ends_the_capture(
    capture: Capture, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_file(saved)
    original = first_content.OpenedFile

    def opened_late(path: str) -> Any:
        os.utime(path, ns=(1, 1))
        return original(path)

    monkeypatch.setattr(first_content, "OpenedFile", opened_late)
    with pytest.raises(CaptureFailed, match="changed while it was captured"):
        capture(program(loaded), file_validation="digest")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"file_policy": "copy"}, "reference, capture-ranges, capture-all, fail"),
        ({"file_validation": "mtime"}, "identity, digest"),
        ({"files": ["/nonexistent/file"]}, "No such file"),
        ({"payload": "none", "file_policy": "reference"}, "payload='none'"),
        ({"payload": "none", "files": ["x"]}, "payload='none'"),
        ({"payload": "integers", "digests": "ops"}, "digests='none'"),
        ({"payload": "some"}, "full, integers, none"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CaptureOptions(**options)


def test_one_file_may_be_given_without_a_list(saved: Path) -> None:
    assert CaptureOptions(files=saved).files == CaptureOptions(files=[str(saved)]).files == (os.path.realpath(saved),)
