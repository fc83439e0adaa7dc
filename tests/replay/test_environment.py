"""What decides numerics besides the operators is recorded, and what differs at a replay is named with both values."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from in_process import Tools
from in_process import tools as tools

from replayfmt.errors import ReplayRefused
from replayfmt.format.reader import open_capture
from replayfmt.pytorch import environment
from replayfmt.pytorch.environment import SETTINGS, apply_settings, preserved_settings, read_settings
from replayfmt.replay.plan import Plan
from replayfmt.replay.verification import tunes_convolutions

from .conftest import Captured
from .rewriting import rewrite


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"])
@pytest.mark.parametrize(("then", "now"), [("0", None), (None, "1"), (":4096:8", ":16:8")])
def test_a_variable_of_cudas_libraries_that_differs_is_named_with_both_values(
    captured: Captured, tools: Tools, monkeypatch: pytest.MonkeyPatch, name: str, then: str | None, now: str | None
) -> None:
    def setting(value: str | None) -> None:
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    setting(then)
    path = captured(lambda: torch.ones(3).exp())
    with open_capture(path) as reader:
        assert reader.session.libraries.get(name) == then
    setting(now)
    ran = tools("run", path)
    assert ran.code == 0 and "verified: close" in ran.out
    assert f"  why: {name} {now or 'unset'} here, {then or 'unset'} in the capture" in ran.out
    setting(then)
    assert "verified: bitwise" in tools("run", path).out


def test_the_wheels_of_cudas_libraries_are_recorded_and_compared(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn": "9.19.0.56"}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(environment, "version", version)
    assert environment._wheels.__wrapped__("12") == found
    path = captured(lambda: torch.ones(3).exp())
    with open_capture(path) as reader:
        libraries = {**reader.session.libraries, **found}
    elsewhere = rewrite(path, tmp_path / "elsewhere.opreplay", session={"libraries": libraries})
    with Plan(elsewhere) as plan:
        result = plan.execute(verify="auto")
    assert result.outcome == "ok" and result.verification.mode == "close"
    assert "nvidia-cudnn unset here, 9.19.0.56 in the capture" in result.verification.reasons


@pytest.mark.slow
def test_nothing_asks_a_device_for_any_of_it() -> None:
    code = (
        "import torch\nfrom replayfmt.pytorch import environment\n"
        "environment.session_fields(); environment.read_settings(); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.version.cuda is None, reason="its libraries come with a build for CUDA")
def test_a_build_for_cuda_states_its_wheels() -> None:
    wheels = [name for name in environment.library_versions() if name.startswith("nvidia-")]
    assert {name.removeprefix("nvidia-")[:5] for name in wheels} == {"cubla", "cudnn"}


@pytest.mark.parametrize(("name", "wrong"), [("preferred_blas", "Fastest"), ("preferred_linalg", 3)])
def test_the_preferred_libraries_are_settings(name: str, wrong: object) -> None:
    value = read_settings()[name]
    assert isinstance(value, str) and value
    with preserved_settings():
        apply_settings({name: value})
        with pytest.raises(ReplayRefused, match=f"the setting {name} = .* cannot be set here: expected one of"):
            apply_settings({name: wrong})  # type: ignore[dict-item]
        if torch.backends.cuda.is_built():
            other = {"preferred_blas": "Cublaslt", "preferred_linalg": "Cusolver"}[name]
            apply_settings({name: other})
            assert read_settings()[name] == other
    assert read_settings()[name] == value


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a build without CUDA has no choice")
def test_a_preference_that_changes_under_a_capture_is_replayed(captured: Captured) -> None:
    def program() -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    with preserved_settings():
        path = captured(program)
    before = read_settings()
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
    assert read_settings() == before


def test_the_attention_kernels_that_may_be_chosen_are_settings() -> None:
    assert {"sdp_flash", "sdp_mem_efficient", "sdp_math", "sdp_cudnn"} <= SETTINGS.keys()


@pytest.mark.parametrize("when", ["before", "inside", "never"])
def test_convolutions_that_are_chosen_by_their_speed_are_known(captured: Captured, when: str) -> None:
    def program() -> None:
        torch.backends.cudnn.benchmark = when != "never"
        torch.nn.functional.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))

    with preserved_settings():
        torch.backends.cudnn.benchmark = when == "before"
        path = captured(program)
    with open_capture(path) as reader:
        stated = reader.session.settings["cudnn_benchmark"]
        assert stated is (when == "before")
        # A change that nothing in this build depends on is not recorded.
        assert tunes_convolutions(reader) is (when == "before" or (when == "inside" and torch.backends.cuda.is_built()))
