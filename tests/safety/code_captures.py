"""Captures of kernels with code of their own, made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from format.samples import IMPORT, Records, op

from replayfmt.format.codes import DType, KernelKind, Layout, StorageOrigin, ValueKind
from replayfmt.format.model import Attachment, CaptureInfo, Device, Kernel, Node, TensorMeta
from replayfmt.format.writer import CaptureWriter

V = ValueKind
CONTENT = np.array([1.0, -2.0], np.float32)
Given = list[tuple[str, bytes]]  # role and content of each attachment
CODE: Given = [("source", b"import os; os.mkdir('ran')"), ("metadata", b'{"target": "cpu"}'), ("cubin", b"\x7fELF")]


def write(
    path: Path,
    attachments: Given = CODE,
    kernels: int = 1,
    kind: KernelKind = KernelKind.native,
    *,
    called: bool = True,
    last: Given | None = None,
) -> Path:
    """A capture in which each kernel negates a tensor of two elements in place, if it is called. `last`: the
    attachments of the last kernel, if it has others."""
    writer = CaptureWriter(path, CaptureInfo("01234567-89ab-cdef-0123-456789abcdef", "opreplay", "0.1.0"))
    cpu = writer.device(Device("cpu"))
    meta = writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2,), (1,)))
    numbers, numbers_of_last = (
        tuple(writer.attachment(Attachment(role, f"a.{role}", writer.payload(content))) for role, content in given)
        for given in (attachments, attachments if last is None else last)
    )
    payload = writer.payload(CONTENT.data)
    records = Records(writer)
    storage = records.storage(8, cpu, StorageOrigin.payload, payload)
    tensor = records.tensor(storage, 0, meta)
    records.add(IMPORT, ints=(storage, payload, 0))
    for number in range(kernels):
        name = f"native::negate{number}"
        schema = f"{name}.v1(Tensor(a!) self) -> Tensor(a!)"
        kernel = writer.kernel(Kernel(name, "v1", schema, kind, numbers_of_last if number == kernels - 1 else numbers))
        if called:
            records.add(op(kernel, (Node(V.tensor, "self"),), (Node(V.tensor),)), (tensor, tensor))
    records.write()
    writer.close(1)
    return path
