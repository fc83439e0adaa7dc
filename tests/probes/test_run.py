"""opreplay-probe run, without a GPU: launches that Triton compiled for one are replayed on the CPU, and their PTX, with
and without probes, is run by the tests' interpreter on the memory of the replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opreplay_tools.probe import main

import replayfmt
from replayfmt.probes.definitions import find_probe
from replayfmt.probes.recordings import ProbeRecording, read_event_log, read_tensors
from replayfmt.probes.reporting import NamedFile, evaluate
from replayfmt.probes.tables import as_json
from tests.triton_kernels.conftest import run_python, skip_unless_triton_compiles

from .interpreter import SM
from .recorded_launches import BLOCK, N

ORIGINALS = ["original"] * 5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    skip_unless_triton_compiles()
    folder = tmp_path_factory.mktemp("probed")
    program = ("-m", "tests.probes.recorded_launches")
    done = run_python(*program, "record", str(folder / "a.opreplay"), interpret="0", cache=folder / "cache")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    done = run_python(*program, "probe", str(folder / "a.opreplay"), str(folder))
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "again": again, "folder": folder}


def records(row: dict[str, Any], probe: str) -> np.ndarray[Any, Any]:
    return np.asarray(ProbeRecording.open(row["recording"]).section(0).records(find_probe(probe).layout))


@pytest.mark.slow
def test_every_launch_is_run_without_and_with_the_probe_and_keeps_its_results(found: dict[str, Any]) -> None:
    case = found["schedule"]
    assert [row["outcome"] for row in case["rows"]] == ["bitwise", "bitwise"]
    assert [row["ordinal"] for row in case["rows"]] == case["planned"]
    assert case["launches"] == [*ORIGINALS, "probed"] * 2
    for row in case["rows"]:
        saved = records(row, "block_sched")
        assert saved.shape == (3, 2, 1) and (saved["sm"] == SM).all() and (saved["elapsed"] > 0).all()


@pytest.mark.slow
def test_the_folder_is_one_that_reports_read(found: dict[str, Any]) -> None:
    folder = found["folder"] / "schedule"
    (name,) = [each.name for each in (folder / "kernel").iterdir()]
    log = read_event_log(folder / "event.log")
    assert log.folders == {name: "triton_add"}
    assert [(each.kernel, each.probe_bytes) for each in log.launches] == [("triton_add", 3 * 2 * 16)] * 2
    assert all(each.times is not None and each.times.original_ms > 0 for each in log.launches)
    schedule = as_json(evaluate("schedule", [NamedFile.parse(found["schedule"]["rows"][0]["recording"])]))
    assert '"blocks": 3' in json.dumps(schedule)
    overhead = json.dumps(as_json(evaluate("overhead", [NamedFile.parse(str(folder))])))
    assert "registers" in overhead and "triton_add" in overhead


def test_what_a_replay_compiles_for_its_device_is_what_is_probed(found: dict[str, Any]) -> None:
    """A kernel whose binary is not in the capture, or is for another device, as Inductor's are."""
    again = found["again"]
    assert again["how"].startswith("compiled by Triton from the stored source")
    assert (again["before"], again["entry"]) == (0, "triton_add")
    assert again["same parameters"] and again["same shape"]


def test_bytes_are_those_of_the_kernels_arithmetic(found: dict[str, Any]) -> None:
    """A gather loads an index where the mask holds, an element in every thread, and stores where the mask holds."""
    (row,) = found["bytes"]["rows"]
    assert records(row, "gmem_bytes")["sync_bytes"].sum() == 4 * (N + 3 * BLOCK + N)


def test_addresses_are_those_of_the_captured_tensors(found: dict[str, Any]) -> None:
    case = found["dmat"]
    assert case["launches"] == [*ORIGINALS, "probed", "probed"]  # one of them counts
    (row,) = case["rows"]
    saved = records(row, "dmat")
    addresses = np.unique(saved["address"][saved["address"] > 0])
    tensors = {each.name: each for each in read_tensors(found["folder"] / "dmat" / "tensor.trace")}
    assert set(tensors) == {"x", "y", "out"}
    inside = {
        name: addresses[(addresses >= each.begin) & (addresses < each.begin + each.nbytes)] - each.begin
        for name, each in tensors.items()
    }
    assert sum(map(len, inside.values())) == len(addresses)
    assert inside["x"].tolist() == inside["y"].tolist() == inside["out"].tolist()
    assert inside["x"].min() == 0 and inside["x"].max() < 4 * N
    report = as_json(evaluate("dmat", [NamedFile.parse(row["recording"])]))
    assert '"touched_pages"' in json.dumps(report)


def test_a_probe_that_changes_a_result_is_found_and_has_no_recording(found: dict[str, Any]) -> None:
    for row in found["broken probe"]["rows"]:
        assert (row["outcome"], row["recording"]) == ("differs", None)
        assert row["why"].endswith("1 bytes differ, the first is byte 5 of its storage")
        assert row["why"].startswith("with the probe: argument ")
    assert [each.name for each in (found["folder"] / "broken").iterdir()] == ["kernel"]


@pytest.mark.parametrize(
    ("name", "error", "why", "launched"),
    [
        ("too many bytes", "ReplayRefused", "probe block_sched needs 96 bytes; --max-bytes allows 90", 0),
        ("too many records", "ReplayRefused", "probe dmat needs 18,432 bytes; --max-bytes allows 4,000", 6),
        ("not allowed", "ReplayRefused", "runs only with --allow-code", 0),
        ("unknown", "UsageError", "expected a kernel triton::nothing; there are: aten::randn.default", 0),
        ("operator", "PtxError", "aten::randn.default: not probeable: no PTX", 0),
    ],
)
def test_what_cannot_be_run_is_refused(found: dict[str, Any], name: str, error: str, why: str, launched: int) -> None:
    case = found[name]
    assert case["error"] == error and why in case["text"]
    assert len(case["launches"]) == launched


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["opreplay-probe", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_tool_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        torch.ones(3) + 1
    given = ["run", path, "--tool=block_sched"]
    assert ran(monkeypatch, *given) == 2
    assert "run: expected CAPTURE, --tool=PROBE and -o DIR" in capsys.readouterr().err
    assert ran(monkeypatch, *given, "-o", tmp_path / "out") == 2
    assert "a probe runs on one CUDA device, this replay is on cpu" in capsys.readouterr().err
    assert ran(monkeypatch, *given, "-o", tmp_path / "out", "--records=2") == 2
    assert "--records is an option of instrument; run does not use it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
