"""What a trace says that no replay needs is kept all the same: generated kernels, single durations, devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opreplay_tools.dump import cli as dump

from replayfmt.export.replay_zip import export_replay_zip
from replayfmt.format.model import Device
from replayfmt.format.reader import open_capture
from replayfmt.importers.tracelens import import_tracelens

from .conftest import Import
from .traces import H100, MM, kernel, launch, op, scalar, tensor

WHERE = {
    "kernel_backend": "triton",
    "kernel_file": "/tmp/torchinductor/cm/cmwj.py",
    "kernel_hash": "cmwj",
    "kernel_kwargs": "XBLOCK=2",
    "num_warps": 8,
    "num_stages": 1,
}
TRITON = [
    op("triton_red_fused_add_0", 10, 20, [tensor("c10::BFloat16", 8, 64), scalar("512")], stream=0, **WHERE),
    launch(1, 12),
    kernel(1, 50, 5, "triton_red_fused_add_0"),
]


@pytest.mark.parametrize("unique", [False, True])
def test_a_triton_launch_keeps_its_file_hash_warps_and_inputs(unique: bool, imported: Import) -> None:
    other = {**TRITON[0], "ts": 100, "args": {**TRITON[0]["args"], "kernel_hash": "other"}}
    result = imported([*TRITON, other, launch(2, 102), kernel(2, 150, 5, "triton_red_fused_add_0")], unique=unique)
    first, second = result.of("unsupported")
    assert first.argument("reason") == "triton_launch" and first.annotation is not None
    kept = first.annotation["triton"]
    assert kept.pop("inputs") == {
        "Input type": ["c10::BFloat16", "Scalar"],
        "Input Dims": [[8, 64], []],
        "Input Strides": [[64, 1], []],
        "Concrete Inputs": ["", "512"],
    }
    assert kept == {"kernel": "triton_red_fused_add_0", **WHERE}
    assert first.annotation["arguments"] == "bfloat16[8,64], 512"
    assert second.annotation is not None and second.annotation["triton"]["kernel_hash"] == "other"


def test_dump_shows_how_long_unsupported_work_took_on_the_device(imported: Import) -> None:
    result = imported(
        [
            *TRITON,
            launch(9, 200, name="cudaGraphLaunch"),
            {**kernel(9, 300, 3), "dur": None},
            op("aten::mm", 400, 9, MM),
        ]
    )
    shown = CliRunner().invoke(dump, ["--format=jsonl", result.reader.path])
    rows = [json.loads(line) for line in shown.output.splitlines()]
    assert [row["device_duration_ns"] for row in rows if row["kind"] == "unsupported"] == [5_000, None]


def test_each_kernels_duration_is_kept_beside_their_sum(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 20, MM),
        launch(1, 12),
        kernel(1, 50, 5, "a"),
        launch(2, 14),
        kernel(2, 60, 7, "b"),
        launch(3, 16),
        {**kernel(3, 70, 1, "c"), "dur": None},
    ]
    (record,) = imported(events).of("op")
    assert record.annotation is not None
    assert [(each["name"], each["duration_ns"]) for each in record.annotation["device_kernels"]] == [
        ("a", 5_000),
        ("b", 7_000),
        ("c", None),
    ]
    assert record.device_duration_ns is None, "of one it is not known"
    assert imported(events[:-2]).of("op")[0].device_duration_ns == 12_000


def test_how_far_the_times_of_calls_that_are_alike_lie_apart_is_kept(imported: Import) -> None:
    events = [
        event
        for number, time in enumerate((7, 30, 8))
        for event in (
            op("aten::mm", 100 * number, 20 + number, MM),
            launch(number + 1, 100 * number + 2),
            kernel(number + 1, 100 * number + 50, time),
        )
    ]
    (record,) = imported(events, unique=True).of("op")
    assert record.device_duration_ns == 15_000 and record.duration_ns == 21_000
    assert record.annotation is not None and record.annotation["durations"] == {
        "host_ns": {"min": 20_000, "median": 21_000, "max": 22_000},
        "device_ns": {"min": 7_000, "median": 8_000, "max": 30_000},
    }
    events[-1] = {**events[-1], "dur": None}
    (record,) = imported(events, unique=True).of("op")
    assert record.annotation is not None and list(record.annotation["durations"]) == ["host_ns"], "one is not known"
    assert "durations" not in (imported(events[:3], unique=True).of("op")[0].annotation or {})
    strays = [event for number in (1, 2) for event in (launch(number, number), kernel(number, 50, 2 + number))]
    (record,) = imported(strays, unique=True).of("unsupported")
    assert record.annotation is not None and record.annotation["durations"]["device_ns"]["max"] == 4_000


def exported(imported: Import, path: Path) -> Device:
    result = imported([op("aten::mm", 10, 20, MM), launch(1, 12), kernel(1, 50, 5)], deviceProperties=[H100])
    export_replay_zip(result.reader, path)
    (device,) = (each for each in result.reader.devices if each is not None and each.kind == "cuda")
    return device


def test_devices_survive_an_export_and_its_import(imported: Import, tmp_path: Path) -> None:
    known = exported(imported, tmp_path / "a.zip")
    assert known.name.startswith("NVIDIA H100") and json.loads(known.fingerprint)["capability"] == "9.0"
    report = import_tracelens(tmp_path / "a.zip", tmp_path / "back.opreplay")
    with open_capture(tmp_path / "back.opreplay") as back:
        assert [each for each in back.devices if each is not None and each.kind == "cuda"] == [known]
        export_replay_zip(back, tmp_path / "b.zip")
    import_tracelens(tmp_path / "b.zip", tmp_path / "again.opreplay")
    with open_capture(tmp_path / "again.opreplay") as again:
        assert known in again.devices
    assert not report.problems


@pytest.mark.parametrize(
    "devices",
    [
        {"cuda:x": {"name": "?"}},
        {"cuda:0": {"fingerprint": "["}},
        {"cuda:0": {"fingerprint": "3"}},
        {"cuda:0": 3},
        {"": {}},
        {"cuda:99999999999999999999": {}},
    ],
)
def test_what_a_file_says_of_a_device_that_is_none_is_passed_over_and_told(
    devices: dict[str, Any], tmp_path: Path
) -> None:
    entry = {
        "op_name": "aten::relu",
        "count": 1,
        "opreplay": {"devices": devices},
        "replay_ir": {
            "list_pos_args": [
                {
                    "arg_name": "self",
                    "arg_type": "Tensor",
                    "value": {"shape": [3], "dtype": "float", "strides": [1], "init": "normal"},
                    "opreplay": {"device": "cpu"},
                }
            ],
            "list_kwargs": [],
        },
    }
    path = tmp_path / "event_replay_ir.json"
    path.write_text(json.dumps([entry]))
    report = import_tracelens(path, tmp_path / "out.opreplay")
    assert len(report.problems) == 1 and "was passed over" in report.problems[0]
    assert report.calls()["incomplete"] == 0
