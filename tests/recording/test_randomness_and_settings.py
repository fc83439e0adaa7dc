"""Generator states and global numeric state: in the stream where no replay would be in them, and only there."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.pytorch.environment import SETTINGS, preserved_settings, read_settings

from .conftest import Capture


def test_a_state_is_recorded_once_while_only_captured_ops_draw(capture: Capture) -> None:
    captured = capture(lambda: [torch.rand(3) for _ in range(5)], digests="ops")
    assert len(captured.records(RecordKind.generator_state)) == 1
    captured.replays()


def test_seeding_in_between_and_explicit_generators_are_recorded(capture: Capture) -> None:
    def program() -> Any:
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.rand(2), torch.rand(2, generator=generator), torch.rand(2, generator=generator)]
        torch.manual_seed(5)
        return drawn, torch.rand(2), torch.rand(2, generator=generator)

    captured = capture(program, digests="ops")
    assert len(captured.records(RecordKind.generator_state)) == 3
    generators = captured.reader.generators[1:]
    assert sorted(g.default for g in generators) == [False, True]
    captured.replays()


def test_draws_that_no_op_showed_are_noticed(capture: Capture, tmp_path) -> None:
    import replayfmt

    with replayfmt.capture(tmp_path / "x.opreplay", digests="ops") as recorder:
        torch.rand(2)
        with recorder.paused():
            torch.rand(2)
        torch.rand(2)
    reader = replayfmt.open(tmp_path / "x.opreplay").reader
    assert reader.summary.records[RecordKind.generator_state] == 2


def test_states_are_recorded_without_content_too(capture: Capture) -> None:
    captured = capture(lambda: torch.rand(2), payload="none")
    assert len(captured.records(RecordKind.generator_state)) == 1


def test_attention_without_dropout_draws_nothing(capture: Capture) -> None:
    q = torch.randn(1, 2, 4, 8)
    captured = capture(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert captured.records(RecordKind.generator_state) == []


def test_settings_are_in_the_session_and_their_changes_in_the_stream(capture: Capture) -> None:
    def program() -> Any:
        with torch.no_grad():
            x = torch.ones(2, 2) * 2
        torch.backends.mkldnn.enabled = False
        y = x @ x
        torch.backends.mkldnn.enabled = True
        return y, x @ x

    captured = capture(program)
    settings = captured.reader.session.settings
    assert settings["grad_enabled"] is True
    assert settings["num_threads"] == 1
    changes = [
        {node.name: value for node, value in zip(r.signature.args, r.args, strict=True)}
        for r in captured.records(RecordKind.global_state)
    ]
    assert changes[0] == {"grad_enabled": False}
    assert {"mkldnn_enabled": False} in [{k: v for k, v in c.items() if k == "mkldnn_enabled"} for c in changes]
    assert any(c.get("mkldnn_enabled") is True for c in changes)


def test_a_setting_that_concerns_no_op_is_not_recorded(capture: Capture) -> None:
    def program() -> Any:
        torch.backends.mkldnn.enabled = False
        x = torch.ones(2) + 1
        torch.backends.mkldnn.enabled = True
        return x

    assert capture(program).records(RecordKind.global_state) == []


def test_changes_between_calls_that_repeat_are_noticed_too(capture: Capture) -> None:
    def program() -> Any:
        image, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)
        made = []
        for step in range(8):
            torch.backends.mkldnn.enabled = step % 2 == 0
            with torch.set_grad_enabled(step % 3 == 0):
                made.append(torch.nn.functional.conv2d(image, weight))
        torch.backends.mkldnn.enabled = True
        return made

    changes = capture(program).records(RecordKind.global_state)
    named = [node.name for record in changes for node in record.signature.args]
    assert named.count("mkldnn_enabled") == 7
    assert named.count("grad_enabled") == 5


def test_what_an_op_makes_under_other_settings_is_not_taken_for_what_it_made_before(capture: Capture) -> None:
    def program() -> Any:
        made = []
        for _ in range(4):
            for dtype in (torch.float16, torch.bfloat16):  # the same number of bytes
                torch.set_default_dtype(dtype)
                made.append(torch.ones(4) + 1)
                made.append(torch.arange(4) / 2)
        torch.set_default_dtype(torch.float32)
        return made

    captured = capture(program)
    dtypes = [
        value.meta.dtype.name
        for r in captured.records(RecordKind.op)
        for value in r.results
        if captured.reader.kernels[r.signature.kernel].name == "aten::div"
    ]
    assert dtypes == ["float16", "bfloat16"] * 4
    captured.replays()


def test_each_threads_settings_are_stated_before_its_ops(capture: Capture) -> None:
    def program() -> Any:
        made: list[torch.Tensor] = []

        def work(kind: str) -> None:
            x = torch.ones(3)
            with torch.set_grad_enabled(kind == "sin"):
                for _ in range(200):
                    made.append(getattr(x, kind)())

        threads = [threading.Thread(target=work, args=(kind,)) for kind in ("sin", "cos")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    captured = capture(program)
    reader, grad = captured.reader, captured.reader.session.settings["grad_enabled"]
    seen = 0
    for record in captured.records():
        if record.kind is RecordKind.global_state and record.signature.args[0].name == "grad_enabled":
            grad = record.args[0]
        name = reader.kernels[record.signature.kernel].name if record.kind is RecordKind.op else ""
        if name in ("aten::sin", "aten::cos"):
            assert grad is (name == "aten::sin")
            seen += 1
    assert seen == 400


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    """Precisions of cuDNN's convolutions and recurrent layers that differ: the older flag for both cannot be read."""
    conv, rnn = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = conv.fp32_precision, rnn.fp32_precision
    conv.fp32_precision, rnn.fp32_precision = "tf32", "ieee"
    with pytest.raises(RuntimeError):
        torch._C._get_cudnn_allow_tf32()
    yield
    conv.fp32_precision, rnn.fp32_precision = before


@pytest.mark.usefixtures("mixed_precision")
def test_a_setting_that_cannot_be_read_does_not_keep_a_program_from_being_captured(capture: Capture) -> None:
    def program() -> Any:
        first = torch.ones(3).exp()
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        second = torch.nn.functional.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        return first, second, torch.ones(4).sin()

    captured = capture(program)
    settings = captured.reader.session.settings
    assert "cudnn_allow_tf32" not in settings
    assert (settings["fp32_precision.cuda.conv"], settings["fp32_precision.cuda.rnn"]) == ("tf32", "ieee")
    before = read_settings()
    captured.replays()
    assert read_settings() == before
    with pytest.raises(RuntimeError):
        torch._C._get_cudnn_allow_tf32()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_getter_that_raises_concerns_its_own_setting_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse() -> None:
        raise RuntimeError("not in this state")

    expected = {key: value for key, value in read_settings().items() if key != name}
    monkeypatch.setitem(SETTINGS, name, dataclasses.replace(SETTINGS[name], get=refuse))
    with preserved_settings():
        assert read_settings() == expected


def test_a_setting_that_resists_does_not_keep_the_others_from_being_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_settings()

    def refuse(_value: object) -> None:
        raise ValueError("it stays")

    with pytest.raises(ReplayRefused, match="sdp_flash"), preserved_settings():
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.set_default_dtype(torch.float64)
        monkeypatch.setitem(SETTINGS, "sdp_flash", dataclasses.replace(SETTINGS["sdp_flash"], set=refuse))
    monkeypatch.undo()
    torch.backends.cuda.enable_flash_sdp(True)
    assert read_settings() == before
