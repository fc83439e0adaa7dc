"""Execution traces for tests: real ones, made on the spot, the same in older schemas, and written by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ExecutionTraceObserver, record_function

OLD_KEYS = {"rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema"}


class Mlp:
    """A training step whose every operator the recorder and the observer see alike."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, foreach=True)
        self.inputs, self.labels = torch.randn(5, 6), torch.tensor([0, 2, 1, 1, 0])
        self.losses: list[float] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self) -> None:
        for number in range(3):
            with record_function(f"step {number}"):
                self.losses.append(self.step())


def observe(path: Path, run: Callable[[], Any]) -> Path:
    """Run under PyTorch's observer; the trace is at `path` then."""
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    try:
        run()
    finally:
        observer.stop()
        observer.unregister_callback()
    return path


def as_schema(trace: dict[str, Any], version: str) -> dict[str, Any]:
    """A trace of today as an older PyTorch would have written it: without strides, before 1.0.2 with flat keys."""
    old = copy.deepcopy(trace)
    old["schema"] = version
    for node in old["nodes"]:
        for side in ("inputs", "outputs"):
            node[side].pop("strides", None)
        if version == "1.0.1":
            values = {each["name"]: each["value"] for each in node.pop("attrs")}
            node |= {key: values[key] for key in OLD_KEYS}
            node["parent"] = node.pop("ctrl_deps")
            for side in ("input", "output"):
                group = node.pop(f"{side}s")
                node[f"{side}s"] = group["values"]
                node |= {f"{side}_shapes": group["shapes"], f"{side}_types": group["types"]}
    return old


class Written:
    """A trace written by hand, node by node, in the current schema. Every node is a child of the thread's root."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._next = 100
        self.node("[pytorch|profiler|execution_trace|thread]", number=2, parent=1, scope=7)

    def node(
        self,
        name: str,
        schema: str = "",
        inputs: list[Any] | None = None,
        outputs: list[Any] | None = None,
        *,
        number: int | None = None,
        parent: int = 2,
        scope: int = 0,
        thread: int = 1,
        **attributes: Any,
    ) -> int:
        """A node whose inputs and outputs are Traced tensors or plain values; returns its id."""
        number = self._next + 1 if number is None else number
        self._next = max(self._next, number)
        values = {
            "rf_id": 0,
            "fw_parent": 0,
            "seq_id": -1,
            "scope": scope,
            "tid": thread,
            "fw_tid": 0,
            "op_schema": schema,
            "kernel_backend": "",
            "kernel_file": "",
            "tensor_range": "",
        } | attributes
        self.nodes.append(
            {
                "id": number,
                "name": name,
                "ctrl_deps": parent,
                "inputs": _values(inputs or []),
                "outputs": _values(outputs or []),
                "attrs": [{"name": key, "type": "string", "value": value} for key, value in values.items()],
            }
        )
        return number

    def save(self, path: Path, schema: str = "1.1.1-chakra.0.0.4") -> Path:
        path.write_text(
            json.dumps(
                {
                    "schema": schema,
                    "pid": 1,
                    "time": "2024-01-01 00:00:00",
                    "start_ts": 1,
                    "nodes": self.nodes,
                    "finish_ts": 2,
                }
            )
        )
        return path


class Traced:
    """A tensor of a trace written by hand."""

    def __init__(
        self,
        number: int,
        storage: int,
        sizes: list[int],
        *,
        offset: int = 0,
        strides: list[int] | None = None,
        kind: str = "float",
        item: int = 4,
        device: str = "cpu",
    ) -> None:
        self.sizes, self.kind = sizes, kind
        self.strides = strides if strides is not None else list(torch.empty(sizes, device="meta").stride())
        elements = 1
        for size in sizes:
            elements *= size
        self.value = [number, storage, offset, elements, item, device]


def _values(values: list[Any]) -> dict[str, list[Any]]:
    rows = [_row(value) for value in values]
    return {key: [row[index] for row in rows] for index, key in enumerate(("values", "shapes", "types", "strides"))}


def _row(value: Any) -> tuple[Any, Any, str, Any]:
    if isinstance(value, Traced):
        return value.value, value.sizes, f"Tensor({value.kind})", value.strides
    if value is None:
        return "<None>", [], "None", []
    if isinstance(value, list):
        rows = [_row(each) for each in value]
        return (
            [row[0] for row in rows],
            [row[1] for row in rows],
            f"GenericList[{','.join(row[2] for row in rows)}]",
            [row[3] for row in rows],
        )
    kinds = {bool: "Bool", int: "Int", float: "Double", str: "String"}
    return value, [], kinds[type(value)], []


RELU = "aten::relu(Tensor self) -> Tensor"
ADD_ = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
