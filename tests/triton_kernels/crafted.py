"""Captures of one launch that say what they are told to say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from format.samples import IMPORT, SESSION, Records, op

from replayfmt.format.codes import DType, KernelKind, Layout, StorageOrigin, ValueKind
from replayfmt.format.model import Attachment, Device, Kernel, Node, TensorMeta
from replayfmt.format.writer import CaptureWriter

V = ValueKind
SOURCE = """import triton
import triton.language as tl


@triton.jit
def double(x, n):
    at = tl.program_id(0)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""
SCHEMA = "triton::double.v1(Tensor(a!) x, int n, *, int[] grid) -> ()"


def metadata(source: str) -> dict[str, Any]:
    return {
        "kind": "triton",
        "version": 1,
        "function": "double",
        "parameters": {"x": "x", "n": "n"},
        "grid": "grid",
        "options": {},
        "dtypes": {"x": "float32"},
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "triton": "3.9.0",
        "target": "interpreter",
        "writes": "source",
    }


def craft(
    path: Path,
    *,
    source: str = SOURCE,
    said: dict[str, Any] | None = None,
    grid: tuple[int, ...] = (2,),
    sizes: tuple[int, ...] = (2,),
    dtype: DType = DType.float32,
    schema: str = SCHEMA,
    without: str = "",
    then: str = "aten::neg",
) -> Path:
    """A capture that doubles a tensor on eight bytes, and negates it (or does what `then` is). `said` changes its
    metadata, `without` leaves out a role."""
    writer = CaptureWriter(path, replace(SESSION, settings={}))
    cpu = writer.device(Device("cpu"))
    meta = writer.meta(TensorMeta(dtype, Layout.strided, cpu, sizes, (1,)))
    texts = {"source": source, "metadata": json.dumps({**metadata(source), **(said or {})})}
    numbers = tuple(
        writer.attachment(Attachment(role, f"double.{role}", writer.payload(text.encode())))
        for role, text in texts.items()
        if role != without
    )
    payload = writer.payload(np.array([1.0, -2.0], np.float32).data)
    records = Records(writer)
    storage = records.storage(8, cpu, StorageOrigin.payload, payload)
    tensor = records.tensor(storage, 0, meta)
    records.add(IMPORT, ints=(storage, payload, 0))
    kernel = writer.kernel(Kernel("triton::double", "v1", schema, KernelKind.triton, numbers))
    grid_node = Node(V.list, "grid", None, tuple(Node(V.int) for _ in grid))
    records.add(op(kernel, (Node(V.tensor, "x"), Node(V.int, "n"), grid_node)), (tensor,), (2, *grid))
    result = records.tensor(records.storage(4 * sizes[0], cpu, StorageOrigin.op), 0, meta)
    neg = writer.kernel(Kernel(then, "default", f"{then}(Tensor self) -> Tensor"))
    records.add(op(neg, (Node(V.tensor, "self"),), (Node(V.tensor),)), (tensor, result))
    records.write()
    writer.close(1)
    return path
