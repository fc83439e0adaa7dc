"""Which of the configurations that an autotuner had a replay launches: the captured one, or the one that is fastest
here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.attachments import configuration_rows
from replayfmt.format.reader import CaptureReader

from .conftest import run_python, skip_unless_triton_compiles

# Triton decides when it is imported that it interprets: each replay is a process.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sooner")]
AGAIN = ("--allow-code", "--autotune=again")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    made = tmp_path_factory.mktemp("autotuned")
    done = run_python("-m", "tests.triton_kernels.autotuned_programs", str(made), interpret="1")
    assert done.returncode == 0, done.stderr
    return made


def tool(name: str, *arguments: Any) -> tuple[int, str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([f"opreplay-{name}", *map(str, arguments)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def rows(folder: Path, program: str, *flags: str) -> list[dict[str, Any]]:
    code, out, err = tool("run", "--format=jsonl", *flags, folder / f"{program}.opreplay")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def block(configuration: str) -> int:
    found = re.match(r"BLOCK: (\d+)", configuration)
    assert found
    return int(found[1])


def test_the_captured_configuration_is_launched_by_default_and_the_fastest_if_asked_for(folder: Path) -> None:
    for flags in (("--allow-code",), ("--allow-code", "--autotune=captured")):
        replay, *others = rows(folder, "plain", *flags)
        assert replay["verification"]["mode"] == "bitwise" and not others
    replay, *others = rows(folder, "plain", *AGAIN)
    assert replay["verification"]["mode"] == "close"
    assert "the configuration that is fastest here" in replay["verification"]["reasons"][0]
    assert [each["calls"] for each in others if each["kind"] == "substitution"] == [2, 1]
    choices = [each for each in others if each["kind"] == "configuration"]
    assert [re.findall(r"count=\d+|grid=\[\d+\]", each["launch"]) for each in choices] == [
        ["count=100", "grid=[25]"],
        ["count=201", "grid=[51]"],
    ]
    for each in choices:  # 13 times as many programs are slower
        assert (block(each["captured"]), block(each["chosen"]), each["as_captured"]) == (4, 64, False)
        assert each["times_ns"][each["chosen"]] < each["times_ns"][each["captured"]]


def test_people_read_which_configuration_of_which_kernel_runs(folder: Path) -> None:
    code, out, _ = tool("run", *AGAIN, folder / "plain.opreplay")
    assert "--autotune=again leaves triton::wide_kernel" in out
    assert code == 0 and "autotuned again: 2 of 2 distinct launches are not in the captured configuration" in out
    assert re.search(
        r"triton::add_kernel\.v\w+\(count=201, .*of 2 configurations: \[BLOCK: 64.* us; captured: \[BLOCK: 4", out
    )


def test_a_benchmark_measures_what_was_chosen_and_compares_it_with_what_was_captured(folder: Path) -> None:
    flags = (*AGAIN, "--benchmark-min-time=2x", "--benchmark-format=json")
    code, out, err = tool("benchmark", *flags, folder / "plain.opreplay")
    assert code == 0, err
    assert any(
        "BLOCK: 64" in line and "captured: [BLOCK: 4" in line
        for line in json.loads(out)["context"]["substitution_check"]
    )
    code, out, err = tool("benchmark", "--compare", *flags, folder / "plain.opreplay")
    assert code == 0, err
    (whole,) = [each for each in json.loads(out)["comparisons"] if each["name"] == "whole replay"]
    assert whole["ratio"] < 1


def test_on_a_device_other_configurations_than_that_of_the_stored_binary_are_compiled(tmp_path: Path) -> None:
    skip_unless_triton_compiles()
    script = "tests.triton_kernels.autotuned_programs"
    done = run_python("-m", script, str(tmp_path), "compiled", interpret="0", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (choice,) = found["choices"]
    assert (block(choice["captured"]), block(choice["chosen"]), len(choice["times_ns"])) == (4, 64, 2)
    assert found["launches"] == [["add_kernel", [1563, 1, 1], 4]]


@pytest.mark.parametrize("program", ["chosen_before", "pruned", "heuristics"])
def test_configurations_are_known_however_they_were_chosen(folder: Path, program: str) -> None:
    (choice,) = [each for each in rows(folder, program, *AGAIN) if each["kind"] == "configuration"]
    assert (block(choice["captured"]), block(choice["chosen"]), len(choice["times_ns"])) == (4, 64, 2)


def test_a_configuration_that_cannot_be_launched_is_said_to_fail(folder: Path) -> None:
    (choice,) = [each for each in rows(folder, "failing", *AGAIN) if each["kind"] == "configuration"]
    ((failed, why),) = choice["failed"].items()
    assert block(failed) == 16 and "AssertionError" in why and block(choice["chosen"]) == 64


@pytest.mark.parametrize(
    ("program", "flags", "why"),
    [
        ("hooked", AGAIN, "its configurations have hooks, which are code of the program"),
        ("pruned_before", AGAIN, "leaves configurations out, and had chosen before the launch was captured"),
        ("not_tuned", AGAIN, "no autotuner chose a launch in this capture"),
        ("plain", ("--autotune=again",), "runs only with --allow-code"),
        ("different", AGAIN, "100 of 100 elements are too far off"),
    ],
)
def test_what_cannot_be_chosen_again_is_refused(folder: Path, program: str, flags: tuple[str, ...], why: str) -> None:
    code, out, err = tool("run", *flags, folder / f"{program}.opreplay")
    assert code == 1 and why in err and not out


def test_a_capture_without_sources_has_the_configurations_and_nothing_to_compile(folder: Path, tmp_path: Path) -> None:
    code, _, err = tool("trim", "--no-sources", folder / "plain.opreplay", tmp_path / "bare.opreplay")
    assert code == 0, err
    code, _, err = tool("run", *AGAIN, tmp_path / "bare.opreplay")
    assert code == 1 and "the capture has no source of it" in err


def test_a_part_keeps_its_configurations(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.opreplay"
    code, _, err = tool("trim", "--allow-code", "--kernel=triton::*", folder / "plain.opreplay", part)
    assert code == 0, err
    with CaptureReader(part) as reader:
        assert [len(each["configurations"]) for each in configuration_rows(reader)] == [2, 2]
    code, out, err = tool("run", *AGAIN, part)
    assert code == 0 and "2 of 2 distinct launches" in out, err


@pytest.mark.parametrize("name", ["trim", "export"])
def test_tools_that_keep_what_was_captured_refuse_other_configurations(folder: Path, tmp_path: Path, name: str) -> None:
    more = ("--format=kernel-task", "--kernel=triton::add_kernel") if name == "export" else ()
    code, _, err = tool(name, *AGAIN, *more, folder / "plain.opreplay", tmp_path / "out")
    assert code == 2 and "--autotune=again" in err
