"""The task in a folder: its cases, their arguments on memory, and other inputs for them. A part of check.py."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayfmt.pytorch.guards import Memory


@dataclass(frozen=True)
class Options:
    variants: bool = False
    guard: bool = False
    pages: str = ""  # which page is unreadable: ARGUMENT:before, ARGUMENT:after; all of them if empty
    allow: Sequence[str] = ()
    min_time_s: float = 0.05
    cold_bytes: int = 0  # how much is rewritten between timed calls
    timeout_s: float = 120.0
    memory_bytes: int = 8 << 30
    jobs: int = 2
    only: str = ""


# The fields of a task.json that are used, and their types: a list's is that of each item.
_TENSOR_FORM = {"storage": int, "dtype": str, "sizes": [int], "strides": [int], "offset": int}
_STORAGE_FORM = {"entry": str, "arguments": [str], "bytes": int, "dtype": str, "device": str, "make": str | None}
_WORK_FORM: dict[str, Any] = {
    "name": str,
    "signature": str,
    "program": int,
    "calls": int,
    "arguments": dict,
    "keyword_only": [str],
}
_WORK_FORM |= {"storages": [_STORAGE_FORM], "cases": [{"file": str}], "compute_dtype": str | None}
_WORK_FORM |= dict.fromkeys(("flops", "bytes_read", "bytes_written"), int | None)
_WORK_FORM |= dict.fromkeys(("flops_reason", "bytes_reason"), str | None)
_TASK_FORM: dict[str, Any] = {
    "name": str,
    "kind": str,
    "function": str,
    "operator": str | None,
    "inputs": str,
    "capture_session": str,
}
_TASK_FORM |= {"workloads": [_WORK_FORM]}


def _require_form(value: Any, form: Any, where: str) -> None:
    """Raise ValueError where a value is not of this form."""
    if isinstance(form, list) and isinstance(value, list):
        for place, each in enumerate(value):
            _require_form(each, form[0], f"{where}[{place}]")
    elif isinstance(form, dict) and isinstance(value, dict):
        for name, each in form.items():
            _require_form(value.get(name), each, f"{where}.{name}")
    elif isinstance(form, list | dict) or isinstance(value, bool) or not isinstance(value, form):
        raise ValueError(f"{where} is {value!a:.60}, which is not of the type that a task has there")
    elif isinstance(value, int) and not 0 <= value < 1 << 63:
        raise ValueError(f"{where} is {value!a:.60}; expected a number from 0 that fits 64 bits")


def load_task(folder: Path) -> dict[str, Any]:
    """The task of a folder. Raises ValueError and OSError."""
    try:
        found = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: task.json is not JSON, or is nested too deeply: {error}") from None
    if not isinstance(found, dict) or found.get("format") != "opreplay-kernel-task":
        raise ValueError(f"{folder}: task.json is not that of a kernel task")
    if found.get("version") != 1:
        raise ValueError(f"{folder}: the task has version {found.get('version')!r}; this reads version 1")
    _require_form(found, _TASK_FORM, f"{folder}: task.json")
    for each in found["workloads"]:
        where = f"{folder}: task.json: {each['name']!a}"
        for tensor in _tensors(each["arguments"]):
            _require_form(tensor, _TENSOR_FORM, where)
            if tensor["storage"] >= len(each["storages"]):
                raise ValueError(f"{where} has {len(each['storages'])} storages, and an argument on another one")
        for name in filter(None, [each["compute_dtype"], *(storage["dtype"] for storage in each["storages"])]):
            dtype_of(name)
        try:
            for storage in each["storages"]:
                torch.device(storage["device"])
        except RuntimeError as error:
            raise ValueError(f"{where}: {error}") from None
    return found


def read_safetensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The bytes of each entry whose name begins so. Raises ValueError and OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise ValueError(f"{path}: is not a safetensors file")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            places = [(name, first, end) for name, (first, end) in entries.items()]
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise ValueError(f"{path}: is not a safetensors file") from None
        found = {}
        for name, first, end in places:
            if not (type(first) is type(end) is int and 0 <= first <= end <= size - 8 - length):
                raise ValueError(f"{path}: {name} lies outside of the file")
            if not name.startswith(prefix):
                continue
            file.seek(8 + length + first)
            found[name] = torch.frombuffer(bytearray(file.read(end - first)) or bytearray(1), dtype=torch.uint8)[
                : end - first
            ]
    return found


def import_file(path: Path, name: str) -> Any:
    """A Python file as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this PyTorch, {torch.__version__}, has no dtype {name!a}")
    return found


class Case:
    """The captured inputs of one workload: the contents of its storages, each flat with the dtype of its elements."""

    def __init__(self, folder: Path, task: dict[str, Any], workload: dict[str, Any], number: int, make: Any) -> None:
        self.task, self.workload = task, workload
        self.name = f"{workload['name']}.{number}"
        file = workload["cases"][number]["file"] if number < len(workload["cases"]) else None
        self.path = folder / str(file)
        entries = read_safetensors(self.path, "input.") if file else {}  # a kernel could find outputs in its process
        known = {storage["entry"] for storage in workload["storages"]}
        if file and known != set(entries):
            raise ValueError(f"{self.path}: has {sorted(entries)!a:.200}; expected the inputs {sorted(known)!a:.200}")
        self.contents = []
        for place, storage in enumerate(workload["storages"]):
            dtype, length = dtype_of(storage["dtype"]), int(storage["bytes"])
            data = entries.get(storage["entry"])
            if data is None:
                count = length // dtype.itemsize
                filled = torch.zeros(count, dtype=dtype)
                if make is not None and make.get(storage["make"]) is not None:
                    filled[:] = make[storage["make"]](count, torch.Generator().manual_seed(place))
                data = torch.zeros(length, dtype=torch.uint8)
                data[: count * dtype.itemsize] = filled.view(torch.uint8)
            if len(data) != length:
                raise ValueError(f"{self.path}: {storage['entry']} has {len(data)} bytes, expected {length}")
            self.contents.append(data.view(dtype) if length % dtype.itemsize == 0 else data)
        self.inputs = list(entries.values())
        self.digest = workload["cases"][number].get("digest") if file else None

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the file has of the original's outputs. Raises ValueError if its inputs are not those that were
        exported."""
        if self.digest is not None:
            hashed = hashlib.sha256()
            for data in self.inputs:
                hashed.update((ctypes.c_char * len(data)).from_address(data.data_ptr()) if len(data) else b"")
            if hashed.hexdigest() != self.digest:
                raise ValueError(f"{self.path}: is damaged: its inputs are not those that were exported")
        return read_safetensors(self.path) if self.inputs else {}

    def like(self, outputs: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor | None:
        """One of these outputs with the dtype and the sizes of a tensor, None if it is not there. Raises ValueError."""
        data = outputs.get(name)
        if data is not None and len(data) != like.numel() * like.itemsize:
            raise ValueError(
                f"{self.path}: {name} has {len(data)} bytes, expected {like.numel() * like.itemsize}: "
                f"{like.dtype} of {list(like.shape)}"
            )
        return None if data is None else data.view(like.dtype).reshape(like.shape)

    def names(self, place: int) -> str:
        """The arguments on a storage."""
        return ", ".join(self.workload["storages"][place]["arguments"])


@dataclass(frozen=True)
class Sizes:
    """Other sizes of a workload's tensors: every dimension of `old` becomes `new`."""

    old: int
    new: int
    lists: bool


class Arguments:
    """Builds a workload's arguments on memory."""

    def __init__(self, case: Case, memories: list[Memory], sizes: Sizes | None = None, widened: bool = False) -> None:
        self._case, self._memories, self._sizes, self._widened = case, memories, sizes, widened
        given = {name: self._value(value) for name, value in case.workload["arguments"].items()}
        by_name = set(case.workload["keyword_only"])
        self.positional = tuple(value for name, value in given.items() if name not in by_name)
        self.named = {name: value for name, value in given.items() if name in by_name}

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, dict):
            if "storage" in value:
                return self._tensor(value)
            if "$torch" in value:
                found = getattr(torch, value["$torch"])
                return torch.float64 if self._widened and found in WIDENED else found
            if "$device" in value:
                return torch.device(value["$device"])
            if "$complex" in value:
                return complex(*map(float, value["$complex"]))
            if "$float" in value:
                return float(value["$float"])
        if self._sizes is not None and self._sizes.lists and value == self._sizes.old and isinstance(value, int):
            return self._sizes.new
        return value

    def _tensor(self, spec: dict[str, Any]) -> torch.Tensor:
        dtype = dtype_of(spec["dtype"])
        if self._widened and dtype in WIDENED:
            dtype = torch.float64
        sizes, strides, offset = list(spec["sizes"]), list(spec["strides"]), int(spec["offset"])
        if self._sizes is not None:
            sizes, strides, offset = resized(sizes, strides, self._sizes), strides, 0
            strides = dense_strides(sizes, strides)
        memory = self._memories[spec["storage"]]
        tensor = torch.empty(0, dtype=dtype, device=memory.tensor.device).set_(memory.storage, offset, sizes, strides)
        for flag in spec.get("flags", ()):
            tensor = {"conj": torch.conj, "neg": torch._neg_view}[flag](tensor)
        return tensor


WIDENED = {torch.float16, torch.bfloat16, torch.float32}


def resized(sizes: list[int], strides: list[int], change: Sizes) -> list[int]:
    return [change.new if size == change.old and stride else size for size, stride in zip(sizes, strides, strict=True)]


def dense_strides(sizes: list[int], strides: list[int]) -> list[int]:
    """Strides without gaps, in the order of these; repeated dimensions stay repeated."""
    found, step = list(strides), 1
    for place in sorted(range(len(sizes)), key=lambda each: (strides[each], -each)):
        if strides[place]:
            found[place], step = step, step * max(sizes[place], 1)
    return found


def leaves(value: Any) -> list[Any]:
    """The tensors and numbers of a result."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [] if value is None else [value]


def resampled(contents: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Other values of the same distribution: elements drawn from the captured ones. Integers are indices, lengths and
    masks, and stay, unless there is nothing else."""
    generator = torch.Generator().manual_seed(seed)
    floats = [each for each in contents if is_float(each)]
    changed = []
    for each in contents:
        if each.numel() > 1 and (is_float(each) or not floats):
            if is_float(each) and bool((each == each[0]).all()):
                each = each * 0.75
            elif is_float(each):
                each = each[torch.randint(0, each.numel(), (each.numel(),), generator=generator)]
            else:
                each = each[torch.randperm(each.numel(), generator=generator)]
        elif is_float(each):
            each = each * 0.75
        changed.append(each)
    return changed


def scaled(contents: list[torch.Tensor], _seed: int) -> list[torch.Tensor]:
    return [(each.to(torch.float64) * 0.75).to(each.dtype) if _is_real(each) else each for each in contents]


def zeros(contents: list[torch.Tensor], _seed: int) -> list[torch.Tensor]:
    return [torch.zeros_like(each) if is_float(each) else each for each in contents]


def nonfinite(contents: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for each in contents:
        if _is_real(each) and each.numel() > 3 and each.element_size() > 1:
            each = each.clone()
            places = torch.randperm(each.numel(), generator=generator)[:3]
            each[places] = torch.tensor([float("nan"), float("inf"), float("-inf")]).to(each.dtype)
        found.append(each)
    return found


def is_float(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex()


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


@dataclass(frozen=True)
class Variant:
    """Inputs to run with: the captured values, or others."""

    name: str
    change: Callable[[list[torch.Tensor], int], list[torch.Tensor]] | None = None
    sizes: Sizes | None = None

    def contents(self, case: Case) -> list[torch.Tensor]:
        found = case.contents if self.change is None else self.change(case.contents, len(self.name))
        if self.sizes is None:
            return found
        needed = [1] * len(found)
        for spec in _tensors(case.workload["arguments"]):
            sizes = resized(spec["sizes"], spec["strides"], self.sizes)
            needed[spec["storage"]] = math.prod(
                size for size, stride in zip(sizes, spec["strides"], strict=True) if stride
            )
        return [_to_length(each, length) for each, length in zip(found, needed, strict=True)]


def _to_length(content: torch.Tensor, length: int) -> torch.Tensor:
    if content.numel() == 0:
        return torch.zeros(length, dtype=content.dtype)
    return content.repeat(-(-length // content.numel()))[:length].clone()


def _tensors(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "storage" in value:
            yield value
        else:
            for each in value.values():
                yield from _tensors(each)
    elif isinstance(value, list):
        for each in value:
            yield from _tensors(each)


CAPTURED = Variant("captured")


def variants_of(case: Case, every: bool) -> list[list[Variant]]:
    """What to run a case with besides its captured values: of each list the first that the reference accepts."""
    found = [[Variant("resampled", resampled), Variant("scaled", scaled)]]
    if not every:
        return found
    found += [[Variant("zeros", zeros)], [Variant("NaN and Inf", nonfinite)]]
    tensors = list(_tensors(case.workload["arguments"]))
    alone = len({spec["storage"] for spec in tensors}) == len(tensors)
    if case.task["kind"] == "operator" and alone:
        there = list(dict.fromkeys(size for spec in tensors for size in spec["sizes"] if size > 1))[:4]
        odd = {size: size - 1 if size % 2 == 0 else size + 2 for size in there}
        for old in there:
            for new in (0, odd[old]) if old == there[0] else (odd[old],):
                name = f"{'0-size' if not new else 'odd size'} ({old} is {new})"
                numbers = f"{name}, also among numbers"
                found.append(
                    [Variant(name, None, Sizes(old, new, False)), Variant(numbers, None, Sizes(old, new, True))]
                )
    return found
