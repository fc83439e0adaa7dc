"""What a trace says of its device kernels is in the capture: one row for each distinct one, with counts and times."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

import replayfmt
from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import DEVICE_KERNELS_ROLE, device_kernel_rows, kernel_tier
from replayfmt.format.model import Attachment
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .conftest import Import
from .traces import ADD, MM, kernel, launch, op

ABOUT = {
    "registers per thread": 32,
    "shared memory": 1024,
    "blocks per SM": 4.5,
    "warps per SM": 18,
    "est. achieved occupancy %": 60,
}
REDUCE = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 12, "Group size": 8}
EVENTS = [
    op("aten::mm", 10, 10, MM),
    launch(1, 12),
    kernel(1, 100, 5, "gemm", **ABOUT),
    launch(2, 14),
    kernel(2, 110, 7, "gemm", **ABOUT),
    op("aten::add_", 30, 10, ADD),
    launch(3, 32),
    kernel(3, 120, 3, "Memcpy HtoD (Pageable -> Device)", category="gpu_memcpy", bytes=64),
    kernel(99, 130, 4, "launched before the trace"),
    kernel(98, 140, 6, "ncclDevKernel", stream=9, **REDUCE),
    {**kernel(97, 150, 1, 'copy "a",\n b', stream=9), "dur": None},
]


def table(imported: Import, tools: Tools, *flags: str) -> list[dict[str, Any]]:
    done = tools("dump", "--device-kernels", "--format=jsonl", *flags, imported(EVENTS).reader.path)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_each_distinct_kernel_has_a_row_with_what_the_trace_says_of_it(imported: Import, tools: Tools) -> None:
    rows = {row["name"]: row for row in table(imported, tools) if row["kind"] == "device_kernel"}
    assert list(rows) == [
        "gemm",
        "ncclDevKernel",
        "launched before the trace",
        "Memcpy HtoD (Pageable -> Device)",
        'copy "a",\n b',
    ]
    gemm = rows["gemm"]
    assert gemm == {
        "kind": "device_kernel",
        "name": "gemm",
        "category": "kernel",
        "tier": "gemm",
        "device": "cuda:0",
        "stream": 7,
        "communication_stream": False,
        "grid": [4, 1, 1],
        "block": [128, 1, 1],
        "shared_memory_bytes": 1024,
        "registers_per_thread": 32,
        "blocks_per_sm": 4.5,
        "warps_per_sm": 18.0,
        "occupancy_percent": 60.0,
        "bytes": None,
        "direction": None,
        "collective_by": None,
        "count": 2,
        "untimed": 0,
        "total_ns": 12_000,
        "min_ns": 5_000,
        "max_ns": 7_000,
        "collective": None,
    }
    copy = rows["Memcpy HtoD (Pageable -> Device)"]
    assert (copy["bytes"], copy["direction"], copy["grid"]) == (64, "HtoD", None)
    assert rows["launched before the trace"]["shared_memory_bytes"] is None
    reduce = rows["ncclDevKernel"]
    assert reduce["collective_by"] == "trace" and reduce["communication_stream"] is True
    assert reduce["collective"] == {
        "name": "allreduce",
        "dtype": "Float",
        "in_elements": 12,
        "out_elements": None,
        "group_size": 8,
        "group": None,
        "group_description": None,
        "group_ranks": None,
    }
    untimed = rows['copy "a",\n b']
    assert (untimed["untimed"], untimed["total_ns"], untimed["min_ns"]) == (1, None, None)


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("__amd_rocclr_copyBuffer", "copy"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "gemm"),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>", "gemm"),
        ("nvjet_hsh_128x128_64x8_1x2_h_bz_NNT", "gemm"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1", "gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
        ("flash_fwd_kernel", "other"),
    ],
)
def test_a_kernel_has_the_tier_of_its_name(name: str, tier: str) -> None:
    assert kernel_tier(name) == tier


def test_an_occupancy_that_the_profiler_failed_to_estimate_is_null_and_a_small_one_is_not(
    imported: Import, tools: Tools
) -> None:
    said = {"wide": (0, 14.5), "narrow": (0, 0.06), "not counted": (0, None)}
    events = [
        kernel(
            number, 100 + 10 * number, 5, name, **{**ABOUT, "est. achieved occupancy %": share, "warps per SM": warps}
        )
        for number, (name, (share, warps)) in enumerate(said.items(), start=1)
    ]
    launches = [launch(number, 10 + number) for number in range(1, 4)]
    path = imported([op("aten::mm", 10, 10, MM), *launches, *events]).reader.path
    done = tools("dump", "--device-kernels", "--format=jsonl", path)
    rows = {row["name"]: row["occupancy_percent"] for row in map(json.loads, done.out.splitlines()) if "name" in row}
    assert rows == {"wide": None, "narrow": 0, "not counted": 0}


def test_streams_that_communicate_are_told_apart(imported: Import, tools: Tools) -> None:
    streams = [row for row in table(imported, tools) if row["kind"] == "device_stream"]
    assert [(row["stream"], row["count"], row["total_ns"], row["communication"]) for row in streams] == [
        (7, 4, 19_000, False),
        (9, 2, 6_000, True),
    ]
    text = tools("dump", "--device-kernels", imported(EVENTS).reader.path).out.splitlines()
    assert text[:2] == [
        "cuda:0 stream 7: 4 kernels, copies and fills, 19.000 us",
        "cuda:0 stream 9: 2 kernels, copies and fills, 6.000 us without the 1 whose time is not known, "
        "communication: 100% in collectives",
    ]
    assert [line.partition(", ")[0] for line in text[2:5]] == [
        "copies and fills: 1 kernels",
        "matrix products: 1 kernels",
        "others: 3 kernels",
    ]
    assert text[7].endswith("ncclDevKernel [allreduce of 12 Float over 8 ranks]")
    assert len(text) == 2 + 3 + 1 + 5, "a name with a line break is on one line"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("ncclDevKernel_AllReduce_Sum_f16", True),
        ("void vllm::cross_device_reduce_1stage<float>", True),
        ("one_shot_all_reduce_kernel", True),
        ("small_gather_kernel", False),
        ("void at::native::reduce_kernel<512>", False),
    ],
)
def test_collectives_that_the_trace_does_not_name_are_known_by_their_names(
    name: str, is_one: bool, imported: Import
) -> None:
    events = [op("aten::mm", 10, 10, MM), launch(1, 12), kernel(1, 100, 5, name)]
    rows = device_kernel_rows(imported(events).reader)
    assert rows is not None and rows[0]["collective_by"] == ("name" if is_one else None)


def test_csv_has_the_same_rows_and_quotes_names(imported: Import, tools: Tools) -> None:
    rows = [row for row in table(imported, tools) if row["kind"] == "device_kernel"]
    out = tools("dump", "--device-kernels", "--format=csv", imported(EVENTS).reader.path).out
    heads = out.splitlines()[0].split(",")
    assert len(set(heads)) == len(heads)
    found = list(csv.DictReader(io.StringIO(out)))
    assert [each["name"] for each in found] == [row["name"] for row in rows]
    assert found[0]["grid"] == "4x1x1" and found[0]["bytes"] == "" and found[1]["communication_stream"] == "true"
    assert [row["tier"] for row in found] == [kernel_tier(row["name"]) for row in found]
    assert found[1]["collective_name"] == "allreduce" and found[1]["collective_out_elements"] == ""
    assert sum(int(each["count"]) for each in found) == 6


def test_the_exported_table_has_the_same_kernels_with_their_tiers(
    imported: Import, tools: Tools, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("pandas")
    rows = [row for row in table(imported, tools) if row["kind"] == "device_kernel"]
    path, out = imported(EVENTS).reader.path, tmp_path / "kernels.csv"
    for form in ("csv", "parquet"):
        tools("export", f"--format={form}", "--table=device-kernels", path, out.with_suffix(f".{form}"))
    found = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [(each["name"], each["tier"]) for each in found] == [(row["name"], row["tier"]) for row in rows]
    assert [each["total_ns"] for each in found] == [
        "" if row["total_ns"] is None else str(row["total_ns"]) for row in rows
    ]
    with replayfmt.open(path) as capture:
        frame = capture.to_pandas("device-kernels")
    assert list(frame["tier"]) == [row["tier"] for row in rows] and frame["count"].sum() == 6
    stored = parquet.read_table(tmp_path / "kernels.parquet").to_pylist()
    assert [each["tier"] for each in stored] == list(frame["tier"])
    refused = tools("export", "--format=csv", "--table=device-kernels", "--kernel=aten::mm", path, tmp_path / "no.csv")
    assert refused.code == 2 and "of the whole trace" in refused.err


def test_jq_works_on_the_rows(imported: Import, tools: Tools) -> None:
    path = imported(EVENTS).reader.path
    done = tools("dump", "--device-kernels", "--jq", 'select(.kind == "device_kernel") | .count', path)
    assert done.out.splitlines() == ["2", "1", "1", "1", "1"]


def test_the_table_is_no_code_and_records_say_when_their_kernels_ran(imported: Import, tools: Tools) -> None:
    result = imported(EVENTS)
    summary = json.loads(tools("dump", "--summary", "--format=jsonl", result.reader.path).out.splitlines()[1])
    assert summary["code"] == {"kernels": 0, "attachments": 0, "sources": 0, "bytes": 0}
    kernels = result.of("op")[0].annotation["device_kernels"]
    assert [(each["device"], each["start_ns"]) for each in kernels] == [("cuda:0", 90_000), ("cuda:0", 100_000)]
    out = Path(result.reader.path).with_name("timeline.json")
    assert tools("export", "--format=perfetto", result.reader.path, out).code == 0
    slices = [
        each for each in json.loads(out.read_text())["traceEvents"] if each.get("pid") == 10 and each["ph"] == "X"
    ]
    assert [(each["name"], each["ts"], each["dur"]) for each in slices[:2]] == [("gemm", 90, 5), ("gemm", 100, 7)]


def test_a_capture_without_the_table_and_flags_that_do_not_fit_are_one_line(imported: Import, tools: Tools) -> None:
    path = imported([op("aten::mm", 10, 10, MM)]).reader.path
    for flags, said in (
        ([], "holds no device kernels; imports of profiler traces with device work keep them"),
        (["--summary"], "it goes with --format and --jq alone"),
        (["--ops=0:1"], "it goes with --format and --jq alone"),
    ):
        done = tools("dump", "--device-kernels", *flags, path)
        assert done.code == 2 and said in done.err and done.err.count("\n") == 1 and not done.out
    done = tools("dump", "--format=csv", path)
    assert done.code == 2 and "--format=csv is for --device-kernels" in done.err


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"rows":[{}]}', '{"rows":' + "[" * 2000 + "]" * 2000 + "}", json.dumps({"rows": [{"name": "a"}]})],
)
def test_a_table_that_is_none_is_one_error(text: str, imported: Import, tmp_path: Path) -> None:
    session = imported(EVENTS).reader.session
    writer = CaptureWriter(tmp_path / "a.opreplay", session)
    writer.attachment(Attachment(DEVICE_KERNELS_ROLE, "device kernels", writer.payload(text.encode())))
    writer.close(0)
    with (
        open_capture(tmp_path / "a.opreplay") as reader,
        pytest.raises(InvalidCapture, match="table of device kernels"),
    ):
        device_kernel_rows(reader)
