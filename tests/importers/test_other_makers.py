"""Files of other makers and other devices: read where they hold the same, named where they do not."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import pytest
from in_process import Tools

from .conftest import Import
from .traces import ADD, MM, kernel, launch, op, tensor, trace


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"SQLite format 3\0" + bytes(80), "SQLite"),
        (b"\x0a\x80\x02\x08\x01\x12\x09/host:CPU" + bytes(300), "XPlane"),
        (b"\x07\x0a\x050.0.4\x40\x08\x01\x12\x09[pytorch|", "Chakra execution trace in protobuf"),
        (b'{"version": "0.0.4"}\n{"id": "1", "name": "x", "type": "COMP_NODE"}', "Chakra execution trace in JSON"),
        (b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "rocprofv3"),
        (b'{"name": "gemm<float, 2>", "device": "0", "signature": {"grid": [1, 1, 1]}}\n', "distinct device kernels"),
        (
            b'{\n "copies": [\n  {\n   "name": "a",\n   "count": 3,\n   "device": "0",\n   "signature": {}}]}',
            "distinct device kernels",
        ),
        (b'{\n  "full_model": {\n    "num_runs": 100,\n    "total_energy_j": 203.3}}', "measured times"),
        (b'{\n  "error_percent": 594.19,\n  "error_us": 69428.5}', "measured times"),
        (
            b'{\n  "start_timestamp": "2026-02-05",\n  "end_timestamp": "2026-02-06",\n  "duration_seconds": 2}',
            "measured times",
        ),
        (b"timestamp,gpu,power_w\n2026-02-06 18:07:24.417881,0,9.93\n", "power log"),
        (b"time,id,pm1,sum\n2026-02-05 01:53:44.020012,0,102.3,102.3\n", "power log"),
        (b'{\n  "summary": {\n    "total_kernels": 144},\n  "kernels": []}', "kernel signatures"),
        (b'{\n  "end_timestamp": "2026-02-06 18:34:49.740",\n  "kernels": []}', "measured times"),
        (b'{\n  "end_timestamp": "2026-02-06 18:34:49.740",\n  "energy_joules": 2.5}', "measured times"),
        (b'"Index","KernelName","gpu-id","queue-id"\n0,"gemm",0,0\n', "rocprof's table"),
        (b'"Kind","Agent_Id","Kernel_Name"\n"KERNEL_DISPATCH",1,"gemm"\n', "rocprof's table"),
        (
            b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true},"traceEvents":[{"ph":"X","pid":1,"tid":3,"ts":1,'
            b'"dur":2,"name":"fusion.1","args":{"hlo_module":"jit_f"}}]}',
            "XLA's profiler",
        ),
        (b'{"Type":48,"CudaEvent":{"startNs":"1","endNs":"2","kernel":{"gridX":1}}}\n', "Nsight Systems' JSON"),
        (b'{"$schema": "https://www.speedscope.app/file-format-schema.json", "profiles": []}', "speedscope"),
        (b"\x0a\x0f\x40\x01\x50\x02\x32\x0a" + bytes(60), "Perfetto trace in protobuf"),
        (b"name,device,count,signature_json\ngemm,0,3,{}\n", "device kernels and their counts"),
        (b"\x28\xb5\x2f\xfd\x04\x00" + bytes(60), "compressed with zstd, which is not read; convert it first"),
        (zlib.compress(b'{"traceEvents": []}'), "compressed with zlib"),
        ('{"traceEvents": []}'.encode("utf-16"), "UTF-16"),
        ('{"traceEvents": []}'.encode("utf-32-be"), "UTF-16 or UTF-32"),
        (gzip.compress(b"{}", mtime=0), "compressed twice"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_another_tools_intact_file_is_named_for_what_it_is(
    content: bytes, told: str, packed: bool, tools: Tools, tmp_path: Path
) -> None:
    path = tmp_path / "profile"
    path.write_bytes(gzip.compress(content) if packed or content.startswith(b"\x1f\x8b") else content)
    code, _out, err = tools("import", path, "-o", tmp_path / "out.opreplay")
    assert code == 3 and err.startswith("UNIMPLEMENTED") and told in err and err.count("\n") == 1


@pytest.mark.parametrize("name", [r"C:\work\x.json", r"C:\Users\x\trace.json", r"\\host\share\q.json"])
@pytest.mark.parametrize("first", [True, False])
def test_a_path_with_single_backslashes_does_not_hide_the_trace(
    name: str, first: bool, imported: Import, tmp_path: Path
) -> None:
    events = f'"traceEvents":{json.dumps([op("aten::mm", 10, 5, MM)])}'
    named = f'"traceName":"{name}"'
    path = tmp_path / "trace.json"
    path.write_text("{" + ",".join([named, events] if first else [events, named]) + "}")
    result = imported(path)
    assert result.ops == ["aten::mm.default"] and len(result.report.problems) == 1


@pytest.mark.parametrize(
    ("category", "device"),
    [("hpu_op", "hpu"), ("hpu_runtime", "hpu"), ("xpu_driver", "xpu"), ("mlu_runtime", "privateuseone")],
)
def test_launches_of_other_runtimes_are_launches(category: str, device: str, imported: Import) -> None:
    events = [op("aten::mm", 10, 20, MM), launch(1, 12, name="synLaunch") | {"cat": category}, kernel(1, 40, 6)]
    result = imported(events)
    assert result.of("op")[0].device_duration_ns == 6000
    (place,) = result.of("op")[0].annotation["device_kernels"]
    assert str(place["device"]).startswith(device)


@pytest.mark.parametrize("category", ["xpu_kernel", "npu_memcpy", "newdevice_memset"])
def test_work_of_other_makers_devices_is_device_work(category: str, imported: Import) -> None:
    result = imported([op("aten::mm", 10, 20, MM), launch(1, 12), kernel(1, 40, 6, category=category)])
    assert result.of("op")[0].device_duration_ns == 6000


def test_a_trace_of_launches_alone_is_refused_with_their_categories(tools: Tools, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.json", [launch(1, 12) | {"cat": "newdevice_runtime"}])
    code, _out, err = tools("import", path, "-o", tmp_path / "out.opreplay")
    assert code == 3 and "1 newdevice_runtime" in err


def test_a_refusal_names_the_categories_that_are_not_known(tools: Tools, tmp_path: Path) -> None:
    events = [op("aten::mm", 10, 20, MM), launch(1, 12) | {"cat": "newdevice_calls"}, kernel(1, 40, 6)]
    code, _out, err = tools("import", trace(tmp_path / "t.json", events), "-o", tmp_path / "out.opreplay")
    assert code == 1 and "unknown categories were left out: 1 newdevice_calls" in err


def test_an_operator_that_pytorch_removed_is_explained(imported: Import) -> None:
    name = "aten::cudnn_convolution_backward_weight"
    (record,) = imported([op(name, 10, 20, [tensor("float", 4, 4)])]).of("unsupported")
    assert "aten::convolution_backward" in str(record.argument("detail"))


def test_an_operator_that_this_pytorch_does_not_have_is_looked_for_in_no_library(imported: Import) -> None:
    (record,) = imported([op("aten::of_tomorrow", 10, 20, [tensor("float", 4, 4)])]).of("unsupported")
    assert "of another version" in str(record.argument("detail")) and "op-library" not in str(record.argument("detail"))


def test_an_operator_that_pytorch_renamed_is_the_new_one(imported: Import) -> None:
    pair = tensor("float", 4)
    result = imported([op("aten::_s_where", 10, 20, [tensor("bool", 4), pair, pair]), op("aten::add", 40, 5, ADD)])
    assert result.ops == ["aten::where.self", "aten::add.Tensor"]
