"""Hand-made profiler traces: events as PyTorch's exporter writes them, and files of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def op(
    name: str,
    start: float,
    duration: float,
    inputs: list[tuple[Any, ...]] | None = None,
    *,
    external: int = 0,
    thread: int = 1,
    category: str = "cpu_op",
    **arguments: Any,
) -> dict[str, Any]:
    """An operator event. Each input is (type, sizes, strides, value), as the trace prints them; None: none recorded."""
    args: dict[str, Any] = {"External id": external, "Record function id": 0, **arguments}
    if inputs is not None:
        columns = list(zip(*[(*each, *([], [], "")[len(each) - 1 :]) for each in inputs], strict=True)) or [()] * 4
        names = ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")
        args |= {key: list(column) for key, column in zip(names, columns, strict=True)}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 10,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def tensor(dtype: str, *sizes: int, strides: list[int] | None = None) -> tuple[Any, ...]:
    """A tensor input, contiguous unless strides are given."""
    if strides is None:
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
    return (dtype, list(sizes), strides, "")


def scalar(value: str) -> tuple[Any, ...]:
    return ("Scalar", [], [], value)


def numbers(value: str) -> tuple[Any, ...]:
    return ("ScalarList", [], [], value)


NONE = ("", [], [], "")


def annotation(name: str, start: float, duration: float, *, thread: int = 1) -> dict[str, Any]:
    return op(name, start, duration, category="user_annotation", thread=thread)


def launch(
    correlation: int, start: float, *, name: str = "cudaLaunchKernel", thread: int = 1, external: int | None = None
) -> dict[str, Any]:
    args: dict[str, Any] = {"cbid": 211, "correlation": correlation}
    if external is not None:
        args["External id"] = external
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": 10,
        "tid": thread,
        "ts": start,
        "dur": 2.0,
        "args": args,
    }


def kernel(
    correlation: int,
    start: float,
    duration: float,
    name: str = "gemm",
    *,
    category: str = "kernel",
    stream: int = 7,
    device: int = 0,
    grid: list[int] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    args = {"device": device, "context": 1, "stream": stream, "correlation": correlation, **arguments}
    if category == "kernel":
        args |= {"grid": grid or [4, 1, 1], "block": [128, 1, 1]}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": args,
    }


H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85018279936,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
}


def trace(path: Path, events: list[dict[str, Any]], **top: Any) -> Path:
    """A trace file, gzip where its name ends so."""
    text = json.dumps({"schemaVersion": 1, **top, "traceEvents": events, "traceName": "step.json"}, indent=1)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


MM = [tensor("float", 4, 8), tensor("float", 8, 3)]
ADD = [tensor("float", 4, 3), tensor("float", 3), scalar("1")]
