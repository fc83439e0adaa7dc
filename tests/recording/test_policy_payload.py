"""Payload policies: which bytes a capture holds, and that values that depend on others are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from replayfmt.format.codes import DType, RecordKind

from .conftest import Capture, Captured
from .external import origins, payload_bytes, ranges, recipes


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def imports(captured: Captured) -> list[tuple[int, str, str]]:
    return [
        (record.argument("version"), type(record.argument("payload")).__name__, record.argument("reason"))
        for record in captured.records(RecordKind.storage_import)
    ]


def test_integers_are_embedded_and_floats_are_left_out(capture: Capture) -> None:
    weights, tokens, mask = torch.randn(10, 4), torch.tensor([1, 3, 5]), torch.tensor([True, False, True])

    def program() -> Any:
        return torch.nn.functional.embedding(tokens, weights)[mask].sum()

    captured = capture(program, payload="integers")
    assert sorted(origins(captured)) == ["initializer", "payload", "payload"]
    assert sorted(payload_bytes(captured)) == sorted([raw(tokens), raw(mask)])
    made = recipes(captured)[0]
    assert (made.dtype, made.elements) == (DType.float32, 40)
    assert made.statistics is not None and made.statistics.mean == pytest.approx(float(weights.double().mean()))
    assert captured.reader.session.policies["payload"] == "integers"
    assert captured.reader.session.policies["digests"] == "none"
    assert captured.reader.session.policies["file-policy"] is None


def test_with_integers_calls_that_repeat_are_decided_alike(capture: Capture) -> None:
    floats = [torch.randn(5) for _ in range(6)]
    whole = [torch.arange(5) for _ in range(6)]
    captured = capture(lambda: [a + b for a, b in zip(floats, whole, strict=True)], payload="integers")
    assert origins(captured) == ["initializer", "payload"] * 6


def test_no_value_that_depends_on_floats_is_recorded(capture: Capture) -> None:
    x = torch.randn(4)

    def program() -> Any:
        y = x * 2
        return y.sum().item(), bool((y > 0).any()), y.tolist(), int(y.argmax())

    for policy in ("integers", "none"):
        captured = capture(program, payload=policy)
        reads = captured.records(RecordKind.host_read)
        assert [read.argument("method") for read in reads] == ["tolist"]
        assert len(reads[0].args) == 2  # method and tensor, no digest
        scalars = [
            record.results
            for record, name in zip(captured.records(RecordKind.op), captured.ops(), strict=True)
            if name == "aten::_local_scalar_dense.default"
        ]
        assert scalars == [(None,)] * 3
        assert not captured.records(RecordKind.digest)


def test_what_was_written_from_outside_is_left_out_again(capture: Capture) -> None:
    array = np.ones(1000, np.float32)
    x = torch.from_numpy(array)

    def program() -> Any:
        first = x + 1
        array[:] = 5
        return first, x + 1

    captured = capture(program, payload="integers")
    assert imports(captured) == [(0, "RecipeValue", "first_use"), (1, "RecipeValue", "outside_write")]
    assert [r.statistics.mean for r in recipes(captured) if r.statistics] == [1.0, 5.0]


def test_floats_that_turn_out_to_be_integers_enter_again(capture: Capture) -> None:
    packed = torch.arange(1, 5).view(torch.float64)

    def program() -> Any:
        first = packed + 1.0
        return first, torch.arange(10)[packed.view(torch.int64)]

    captured = capture(program, payload="integers")
    assert imports(captured) == [(0, "RecipeValue", "first_use"), (1, "PayloadValue", "integer_use")]
    assert payload_bytes(captured) == [raw(packed)]


def test_so_do_those_of_calls_that_repeat(capture: Capture) -> None:
    packed = [torch.arange(1, 5).view(torch.float64) for _ in range(5)]

    def program() -> Any:
        return [(p + 1.0, p.view(torch.int64) + 1) for p in packed]

    captured = capture(program, payload="integers")
    assert [reason for *_, reason in imports(captured)] == ["first_use", "integer_use"] * 5


def test_a_copy_of_bytes_leaves_floats_out(capture: Capture) -> None:
    import copy

    layer = torch.nn.Linear(8, 8)
    x = torch.ones(1, 8)

    def program() -> Any:
        first = layer(x)
        return first, copy.deepcopy(layer)(x)

    captured = capture(program, payload="integers")
    assert not payload_bytes(captured) and set(origins(captured)) == {"initializer"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_floats_that_a_loader_first_sees_as_bytes_are_left_out(
    capture: Capture, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.randn(20, 20).to(dtype), "i": torch.arange(70), "b": torch.arange(99).to(torch.uint8)}, path)

    def program() -> Any:
        loaded = load_file(path)
        return loaded["w"][loaded["i"][:3]] * loaded["b"][0]

    captured = capture(program, payload="integers")
    assert sorted(map(len, payload_bytes(captured))) == [99, 560]
    (made,) = recipes(captured)
    assert (made.dtype.name, made.elements) == (str(dtype).removeprefix("torch."), 400) and made.statistics is not None
    bare = capture(program, payload="none")
    assert not payload_bytes(bare) and sorted(origins(bare)) == ["absent", "absent", "initializer"]
    (made,) = recipes(bare)
    assert made.statistics is None and made.elements == 400


def test_a_model_that_is_loaded_meanwhile_is_left_out(capture: Capture, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokens = torch.arange(8)[None]

    def program() -> Any:
        return GPT2LMHeadModel.from_pretrained(tmp_path / "model")(tokens, labels=tokens).loss

    captured = capture(program, payload="integers")
    assert len(recipes(captured)) > 20
    saved = load_file(tmp_path / "model" / "model.safetensors")
    telling = [raw(tensor) for tensor in saved.values() if tensor.std() > 0]
    assert len(telling) > 5
    assert not [content for content in payload_bytes(captured) if any(each[:32] in content for each in telling)]
    assert captured.unsupported() == {}


def test_with_integers_files_are_used_only_where_asked_for(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.randn(20, 20), "i": torch.arange(70)}, path)
    loaded = load_file(path)

    def program() -> Any:
        return loaded["w"][loaded["i"][:3]]

    assert sorted(origins(capture(program, payload="integers"))) == ["initializer", "payload"]
    asked = capture(program, payload="integers", file_policy="reference")
    assert origins(asked) == ["external_file"] * 2 and not payload_bytes(asked)
    assert asked.reader.session.policies["file-policy"] == "reference"


def test_without_payloads_only_metadata_is_recorded(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.randn(20, 20)}, path)
    loaded = load_file(path)

    def program() -> Any:
        return torch.nn.functional.dropout(loaded["w"] * torch.randn(20), 0.5)

    captured = capture(program, payload="none")
    assert set(origins(captured)) == {"absent"}
    assert not payload_bytes(captured) and not ranges(captured) and not recipes(captured)
    states = captured.records(RecordKind.generator_state)
    assert states and all(record.argument("payload") is None for record in states)
    policies = captured.reader.session.policies
    assert policies["redact"] is True and policies["digests"] == "none"


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_floats_of_every_width_stay_out_where_safetensors_are_loaded_inside(
    tmp_path: Path, capture: Capture, name: str
) -> None:
    secret = torch.frombuffer(bytearray(b"SeCrEt42" * 100), dtype=torch.uint8)
    save_file({"w": secret.view(getattr(torch, name))}, tmp_path / "m.safetensors")
    captured = capture(lambda: load_file(tmp_path / "m.safetensors")["w"].float(), payload="integers")
    assert payload_bytes(captured) == []


def test_bytes_of_a_file_that_is_gone_stay_out_because_they_may_be_floats(tmp_path: Path, capture: Capture) -> None:
    from safetensors import safe_open

    path = tmp_path / "m.safetensors"
    save_file({"w": torch.frombuffer(bytearray(b"SeCrEt42" * 100), dtype=torch.uint8).view(torch.float32)}, path)

    def program() -> Any:
        with safe_open(path, "pt") as file:
            path.unlink()
            return file.get_tensor("w").sum()

    captured = capture(program, payload="integers")
    assert payload_bytes(captured) == []
    assert "absent" in origins(captured)
