"""Checks kernels against the task in this folder. Needs only PyTorch.

    python check.py                       # does the reference give the expected outputs here?
    python check.py mine.py other.py:f    # is a kernel right, and how fast is it?
    python check.py --variants --guard --json=result.json mine.py

A kernel is a function of a Python file, by default the one that the task names, or of a C++ or CUDA source, which is
built. It gets the arguments that the captured program gave the original, and has to return and write what that did.
Each kernel is judged in a process of its own. Exit code 0 if every kernel is accepted, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import fcntl
import gc
import hashlib
import importlib.util
import json
import math
import mmap
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as lacking:
    sys.exit(f"this needs PyTorch, which cannot be imported here: {lacking}")

from replayfmt.pytorch.guards import CANARY, Memory, poisoned
from replayfmt.pytorch.rounding import MARGIN, rounding_runs, spread_of, wide

# Why a kernel is rejected; of several reasons the first in this list is the verdict.
REASONS = {
    "does not load": "the file cannot be imported or built, or has no such function",
    "crashed": "the process died",
    "out of time": "it took longer than allowed",
    "out of memory": "it needs more memory than allowed",
    "reads the task": "it opened the task's inputs, expected outputs or reference",
    "calls the original": "it calls the operator that it is to replace",
    "global state": "it leaves a setting of the process, a random generator or a function changed",
    "late work": "it goes on working after it has returned",
    "lazy": "it returns something that is not a plain tensor, and may not be computed yet",
    "writes outside": "it writes beside its arguments",
    "reads outside": "its outputs depend on memory beside its arguments",
    "mutates inputs": "it writes an argument that the original does not write",
    "raises": "it raises an exception where the original does not",
    "structure": "number, dtype, sizes, strides or device of its outputs are not the original's",
    "aliasing": "an output is on an argument's memory where the original's is not, or the other way round",
    "reuses memory": "two calls return the same memory",
    "cached": "it returns the result of an earlier call",
    "computes once": "it is right in its first call only",
    "uninitialized": "its outputs depend on memory that nothing wrote",
    "alignment": "it is right at aligned addresses only",
    "uncorrelated": "an output has nothing to do with the expected one, however close it is",
    "captured values only": "it is right for the captured values only",
    "wrong": "an output is farther off than rounding explains",
}
SOURCES = (".py", ".cpp", ".cc", ".cu")
REFERENCE = "reference"  # in place of a candidate: the reference is timed
_FIRST_CALL = "the first call"
_TEXT_LIMIT = 400
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 250
_JUDGED = 0.1  # the share of timed calls whose outputs are judged
_FEW_BYTES = 1 << 20  # of inputs: there are several sets of them


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


# ---------------------------------------------------------------------------------------------------------------- task


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


# -------------------------------------------------------------------------------------------------------------- memory


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
                return torch.float64 if self._widened and found in _WIDENED else found
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
        if self._widened and dtype in _WIDENED:
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


_WIDENED = {torch.float16, torch.bfloat16, torch.float32}


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


# ------------------------------------------------------------------------------------------------------------ variants


def resampled(contents: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Other values of the same distribution: elements drawn from the captured ones. Integers are indices, lengths and
    masks, and stay, unless there is nothing else."""
    generator = torch.Generator().manual_seed(seed)
    floats = [each for each in contents if _is_float(each)]
    changed = []
    for each in contents:
        if each.numel() > 1 and (_is_float(each) or not floats):
            if _is_float(each) and bool((each == each[0]).all()):
                each = each * 0.75
            elif _is_float(each):
                each = each[torch.randint(0, each.numel(), (each.numel(),), generator=generator)]
            else:
                each = each[torch.randperm(each.numel(), generator=generator)]
        elif _is_float(each):
            each = each * 0.75
        changed.append(each)
    return changed


def scaled(contents: list[torch.Tensor], _seed: int) -> list[torch.Tensor]:
    return [(each.to(torch.float64) * 0.75).to(each.dtype) if _is_real(each) else each for each in contents]


def zeros(contents: list[torch.Tensor], _seed: int) -> list[torch.Tensor]:
    return [torch.zeros_like(each) if _is_float(each) else each for each in contents]


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


def _is_float(tensor: torch.Tensor) -> bool:
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


# --------------------------------------------------------------------------------------------------------------- calls


@dataclass
class Outcome:
    """One call: its outputs, copies of them as they were when it returned, and its arguments' memory afterwards."""

    outputs: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)  # the argument storage that an output is on
    error: str = ""
    memory_error: bool = False


def memories_of(case: Case, contents: list[torch.Tensor], **how: Any) -> list[Memory]:
    found = []
    for place, (content, storage) in enumerate(zip(contents, case.workload["storages"], strict=True)):
        pages = how.get("pages", "")
        if pages and ":" in pages:
            number, _, side = pages.partition(":")
            pages = side if int(number) == place else ""
        shift = content.element_size() if how.get("shift") else 0
        found.append(Memory(content, storage["device"], shift=shift, canary=how.get("canary", CANARY), pages=pages))
    return found


def run(function: Callable[..., Any], case: Case, memories: list[Memory], sizes: Sizes | None = None) -> Outcome:
    """Call a function once. Exceptions of the function become the outcome's error."""
    arguments = Arguments(case, memories, sizes)
    found = Outcome()
    try:
        with torch.no_grad():
            returned = function(*arguments.positional, **arguments.named)
        _synchronize_current()
        found.outputs = leaves(returned)
        found.values = [each.detach().clone() if type(each) is torch.Tensor else each for each in found.outputs]
    except (Exception, SystemExit) as error:
        found.error = _described(error)
        found.memory_error = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return found
    finally:
        _synchronize()
    found.after = [memory.read() for memory in memories]
    found.places = [_place(each, memories) for each in found.outputs]
    return found


def _place(value: Any, memories: list[Memory]) -> int | None:
    if type(value) is not torch.Tensor or not value.numel():
        return None
    for place, memory in enumerate(memories):
        start = memory.tensor.data_ptr()
        if memory.tensor.device == value.device and start <= value.data_ptr() < start + max(memory.bytes, 1):
            return place
    return None


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"[:_TEXT_LIMIT]


def _accelerated() -> bool:
    return torch.accelerator.is_available()


def _synchronize_current() -> None:
    """Wait for the current stream alone: what another one does is not done when the function returns."""
    if _accelerated():
        torch.accelerator.current_stream().synchronize()


def _synchronize() -> None:
    if _accelerated():
        torch.accelerator.synchronize()


# ----------------------------------------------------------------------------------------------------------- reference


def expectations(function: Callable[..., Any], case: Case, variant: Variant) -> dict[str, Any]:
    """What the reference does with a variant's inputs, and how far rounding moves its outputs."""
    contents = variant.contents(case)
    there = run(function, case, memories_of(case, contents), variant.sizes)
    if there.error:
        return {"error": there.error}
    found: dict[str, Any] = {
        "values": there.values,
        "forms": [_form(each) for each in there.outputs],
        "after": there.after,
        "places": there.places,
        "written": [
            not torch.equal(before.view(torch.uint8), after)
            for before, after in zip(contents, there.after, strict=True)
        ],
        "error": "",
    }
    before = _outputs(there, contents)

    def outputs(taken: tuple[Any, ...], _named: dict[str, Any]) -> list[torch.Tensor] | None:
        pairs = zip(taken, contents, strict=True)
        widened = any(new.dtype is torch.float64 and old.dtype in _WIDENED for new, old in pairs)
        memories = memories_of(case, list(taken))
        arguments = Arguments(case, memories, variant.sizes, widened)
        try:
            with torch.no_grad():
                returned = leaves(function(*arguments.positional, **arguments.named))
        except Exception:
            return None
        again = Outcome(values=returned, after=[memory.read() for memory in memories])
        return _outputs(again, list(taken))

    widen = case.task["kind"] == "operator"
    runs = rounding_runs(outputs, tuple(contents), {}, widen=widen)
    spread = spread_of(before, runs)
    tolerances, correlated = [], []
    for place, value in enumerate(before):
        if not _is_number(value):
            tolerances.append(0.0)
            correlated.append(True)
            continue
        exact = wide(value)
        own = spread.get(place)
        if own is None:
            finite = exact.abs()[exact.isfinite()]
            own = float(torch.finfo(value.dtype).eps) * (float(finite.max()) if finite.numel() else 0.0)
        tolerances.append(MARGIN * own)
        alike = [each[place] for each in runs if each is not None and each[place].shape == value.shape]
        # In double precision, which comes first where there is such a run: is the output more than rounding?
        correlated.append(all(correlation(exact, wide(each)) > 0.9 for each in (alike[:1] if widen else alike)))
    return {**found, "tolerances": tolerances, "correlated": correlated}


def survives(function: Callable[..., Any], case: Case, variant: Variant) -> bool:
    """Whether the reference takes a variant's inputs: with some sizes, kernels kill their process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # the other threads are not in a forked process, which would wait for them
            memories = memories_of(case, variant.contents(case))
            code = 1 if run(function, case, memories, variant.sizes).error else 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _outputs(there: Outcome, contents: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results and then the arguments' memory, as flat tensors of their elements."""
    results = [each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in there.values]
    return results + [
        after.view(before.dtype) if after.numel() % before.element_size() == 0 else after
        for before, after in zip(contents, there.after, strict=True)
    ]


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two double-precision tensors; 1 where it has no meaning."""
    one, other = one.reshape(-1), other.reshape(-1)
    if one.is_complex():
        one, other = torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1)
    keep = one.isfinite() & other.isfinite()
    one, other = one[keep], other[keep]
    if one.numel() < 4:
        return 1.0
    one, other = one - one.mean(), other - other.mean()
    size = float(one.norm())
    if size <= 1e-12 * float(one.numel()) ** 0.5 * float(one.abs().max().clamp(min=1e-300)) or size == 0.0:
        return 1.0
    return float((one * other).sum()) / size / max(float(other.norm()), 1e-300)


# ------------------------------------------------------------------------------------------------------------ judging


@dataclass(frozen=True)
class Difference:
    """How far an output is off: `beyond` elements by more than `tolerance`, the worst at `index`."""

    where: str
    beyond: int
    elements: int
    index: list[int]
    expected: str
    got: str
    tolerance: float
    constant: bool
    not_finite: bool

    def __str__(self) -> str:
        allowed = f", where {self.tolerance:.3g} is allowed" if self.tolerance else ""
        return (
            f"{self.where}: {self.beyond} of {self.elements} elements are too far off, the worst at {self.index}: "
            f"expected {self.expected}, got {self.got}{allowed}"
        )


def difference(where: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> Difference | None:
    """None if the tensors, of one dtype and as many elements, agree."""
    sizes = list(expected.shape)
    expected, got = expected.cpu().reshape(-1), got.cpu().reshape(-1)
    if _is_number(expected):
        one, other = wide(expected), wide(got)
        same = (one == other) | (one.isnan() & other.isnan())
        finite = one.isfinite() & other.isfinite()
        apart = torch.where(finite, (one - other).abs(), torch.full_like(one.abs(), math.inf))
        beyond = ~same & (apart > tolerance)
        apart = torch.where(same, torch.zeros_like(apart), apart)
    else:
        beyond = expected.view(torch.uint8) != got.view(torch.uint8)
        beyond = beyond.view(expected.numel(), -1).any(1) if expected.numel() else beyond
        apart = beyond.to(torch.float64)
        finite = torch.ones_like(beyond)
    count = int(beyond.sum())
    if not count:
        return None
    place = int(torch.where(beyond, apart, torch.full_like(apart, -1.0)).argmax())
    constant = expected.numel() > 3 and bool((got == got[0]).all()) and not bool((expected == expected[0]).all())
    return Difference(
        where,
        count,
        expected.numel(),
        [int(each) for each in torch.unravel_index(torch.tensor(place), sizes)],
        _number(expected[place]),
        _number(got[place]),
        tolerance,
        constant,
        bool((beyond & ~finite).any()),
    )


def _number(element: torch.Tensor) -> str:
    value = element.item() if element.dtype.itemsize > 1 or not element.is_floating_point() else float(element.float())
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


class Fault(Exception):
    """A finding on a candidate."""

    def __init__(self, reason: str, text: str, worst: Difference | None = None) -> None:
        assert reason in REASONS
        super().__init__(text)
        self.reason, self.text, self.worst = reason, text, worst

    def event(self, case: str) -> dict[str, Any]:
        """What the parent process is told."""
        worst = None if self.worst is None else vars(self.worst)
        return {"event": "fault", "case": case, "reason": self.reason, "text": self.text, "worst": worst}


class State:
    """The state of this process that a kernel must leave as it is."""

    _OWNERS: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.accelerator, torch.cuda, torch.storage)
    _OWNERS += (torch.cuda.Event, torch.autograd.profiler, builtins, ctypes, json, math, os, random, threading, time)

    def __init__(self) -> None:
        own = vars(sys.modules[__name__])
        classes = [value for value in own.values() if isinstance(value, type) and value.__module__ == __name__]
        self._functions = [(owner, _functions(owner)) for owner in (*self._OWNERS, sys.modules[__name__], *classes)]
        self._before = self._read()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "default dtype": torch.get_default_dtype(),
            "default device": str(torch.get_default_device()),
            "threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.enabled": torch.backends.cudnn.enabled,
            "mkldnn": torch.backends.mkldnn.enabled,
            "flush denormal": float(torch.tensor([1e-310], dtype=torch.float64) * 1.0) == 0.0,
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "anomaly detection": torch.is_anomaly_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "random generator": torch.get_rng_state().tolist(),
            "Python's random generator": random.getstate(),
            "working directory": os.getcwd(),
        }
        found |= {"a tracer": sys.gettrace(), "a profiler": sys.getprofile()}
        # PyTorch's own operators may not get other kernels: the original would compute, or take, something else.
        kernels = sorted(each for each in torch.library._impls if each.startswith("aten/"))
        return found | {"kernels of PyTorch's operators": kernels}

    def changes(self) -> list[str]:
        after = self._read()
        found = [name for name, value in self._before.items() if after[name] is not value and after[name] != value]
        for owner, functions in self._functions:
            now = _defined(owner)
            for name, (value, code) in functions.items():
                there = now.get(name)
                if (there is not value or getattr(value, "__code__", None) is not code) and not _is_hidden(
                    there, value
                ):
                    found.append(f"{owner.__name__.replace('__main__', 'check.py')}.{name}")
        return found


def _is_hidden(there: Any, value: Any) -> bool:
    """Whether PyTorch replaced a function so that its compiler does not see it, as it does when that is imported."""
    file = getattr(getattr(there, "__code__", None), "co_filename", "")
    return file == os.path.join(os.path.dirname(torch.__file__), "_compile.py") and there.__wrapped__ is value


def _defined(owner: Any) -> dict[str, Any]:
    """What a module or class has, by name, with what it inherits."""
    found: dict[str, Any] = {}
    for kind in reversed(owner.__mro__[:-1]) if isinstance(owner, type) else (owner,):
        found |= vars(kind)
    return found


def _functions(owner: Any) -> dict[str, tuple[Any, Any]]:
    """The functions and classes of a module or class, each with its code."""
    return {
        name: (value, getattr(value, "__code__", None))
        for name, value in _defined(owner).items()
        if callable(value) or isinstance(value, property | classmethod | staticmethod)
    }


class Judge:
    """Judges one candidate, in a process of its own. `tell` reports an event to the parent process."""

    def __init__(self, task: Task, tell: Callable[..., None]) -> None:
        self.task, self.tell = task, tell
        self.armed = False
        self._opened: list[str] = []
        self._own = ""
        self.seen: set[int] = set()  # hashes of what it rightly returned in earlier cases
        self.changes = State().changes  # of the functions as they are now

    def load(self, given: str) -> Callable[..., Any]:
        path, function = split_candidate(given)
        name = function or self.task.task["function"]
        self._own = os.path.realpath(path)
        if not path.endswith(SOURCES):
            raise Fault(
                "does not load",
                f"{os.path.basename(path)} is none of {', '.join(SOURCES)}; a binary for a GPU is tried in a replay: "
                "opreplay-run --replay-kernel-substitution=KERNEL@cubin=FILE",
            )
        if path.endswith(".cu") and not torch.cuda.is_available():
            raise Fault("does not load", "a CUDA source needs a CUDA device, and PyTorch sees none here")
        sys.addaudithook(self._audit)
        settled = self.settled
        self.armed = True
        try:
            if path.endswith(".py"):
                module = import_file(Path(path), "candidate")
            else:
                from torch.utils.cpp_extension import load

                module = load(f"candidate_{abs(hash(self._own))}", [path], verbose=False)
        except (Exception, SystemExit) as error:
            raise Fault("does not load", _described(error)) from None
        finally:
            self.armed = False
        found = getattr(module, name, None)
        if not callable(found):
            there = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            raise Fault("does not load", f"it has no function {name!r}, but {', '.join(there[:8]) or 'none'}")
        settled("while it was loaded")
        return found

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self.armed and isinstance(args[0], str | bytes):
            path = Path(os.path.realpath(os.fsdecode(args[0])))
            inside = path.is_relative_to(self.task.folder) and (
                path.suffix in (".safetensors", ".json") or path.name in ("reference.py", "check.py")
            )
            if str(path) != self._own and (inside or path.is_relative_to(self.task.store)):
                self._opened.append(path.name)

    def settled(self, when: str) -> None:
        """Raises Fault if the process is not as it was."""
        if self._opened:
            raise Fault("reads the task", f"it opened {', '.join(dict.fromkeys(self._opened))} {when}")
        changes = self.changes()
        if changes:
            more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
            raise Fault("global state", f"it changed {', '.join(changes[:4])}{more} {when}")

    def runs_on(self) -> bool:
        """Whether code of the candidate's runs in another thread. Compilers have threads of their own, which wait."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # which refers to itself from here
        for top in frames.values():
            frame: Any = top
            while frame is not None:
                file = frame.f_code.co_filename
                if os.path.realpath(file) == self._own or not (os.path.exists(file) or file.startswith("<frozen")):
                    return True  # a file that does not exist: it made the code as it ran
                frame = frame.f_back
        return False


class CaseJudge:
    """Judges a candidate in one case, with its captured inputs and `variants` of them; without a list of these, calls
    are only timed. What is expected is read after a call, and no longer there in the next one, which could find it."""

    def __init__(self, judge: Judge, function: Callable[..., Any], case: Case, variants: list[Variant] | None) -> None:
        self._judge, self._function, self._case = judge, function, case
        self._settled = judge.settled
        self._judges, self._variants = variants is not None, variants or []
        self._other = next((each for each in self._variants if each.change is not None), None)
        self._calls: list[tuple[str, Outcome]] = []

    def judge(self) -> None:
        """Raises Fault for the first thing that is wrong with the captured inputs of a workload, or with others."""
        case, other, options = self._case, self._other, self._judge.task.options
        memories = memories_of(case, case.contents)
        first = self._call(_FIRST_CALL, CAPTURED, memories)
        second = None
        if other is not None:
            for memory, content in zip(memories, other.contents(case), strict=True):
                memory.write(content)
            second = self._call("a call with other values at the same addresses", other, memories)
            self._own_memory(first, second)
        memories = memories_of(case, case.contents, shift=1)
        shifted = self._call("a call at addresses that are aligned to one element only", CAPTURED, memories)
        memories = memories_of(case, case.contents, canary=0)
        clean = self._call("a call with clean memory", CAPTURED, memories, poison=False)
        self._values(first, second, shifted, clean)
        self._original()
        time.sleep(0.002)
        for what, found in self._calls:
            self._unchanged(what, found)
        for variant in self._variants:
            if variant is not other:
                memories = memories_of(case, variant.contents(case))
                found = self._call(f"a call with {variant.name}", variant, memories)
                self._equal(variant, found, "captured values only")
        for side in ("after", "before") if options.guard else ():
            if options.pages and not options.pages.endswith(side):
                continue
            memories = memories_of(case, case.contents, pages=options.pages or side)
            found = self._call(f"a call between unreadable pages ({side})", CAPTURED, memories)
            self._equal(CAPTURED, found, "reads outside")

    def _call(self, what: str, variant: Variant, memories: list[Memory], poison: bool = True) -> Outcome:
        self._judge.tell(event="call", case=self._case.name, call=what)
        contents = variant.contents(self._case)
        self._judge.armed = True
        with poisoned(poison):
            found = run(self._function, self._case, memories, variant.sizes)
        self._judge.armed = False
        self._settled(f"in {what}")
        self._behaved(what, contents, memories, found, self._expected(variant))
        self._calls.append((what, found))
        return found

    def _expected(self, variant: Variant) -> dict[str, Any]:
        return self._judge.task.expected(self._case, variant)

    def _behaved(
        self, what: str, contents: list[torch.Tensor], memories: list[Memory], found: Outcome, expected: dict[str, Any]
    ) -> None:
        if found.error:
            aligned = "aligned to one element" in what
            reason = "out of memory" if found.memory_error else "alignment" if aligned else "raises"
            raise Fault(reason, f"in {what}: {found.error}")
        if self._judge.runs_on():
            raise Fault("late work", f"a thread that it started in {what} still runs when it has returned")
        for place, memory in enumerate(memories):
            side = memory.overwritten()
            if side:
                raise Fault("writes outside", f"in {what} it wrote {side} argument {self._case.names(place)}")
        for place, (content, after) in enumerate(zip(contents, found.after, strict=True)):
            if not expected["written"][place] and not torch.equal(content.view(torch.uint8), after):
                raise Fault("mutates inputs", f"in {what} it wrote argument {self._case.names(place)}")
        self._structure(what, found, expected)

    def _structure(self, what: str, found: Outcome, expected: dict[str, Any]) -> None:
        count, wanted = len(found.outputs), len(expected["values"])
        if count != wanted:
            raise Fault("structure", f"in {what} it returned {count} values, not {wanted}")
        for place, (value, wanted) in enumerate(zip(found.outputs, expected["values"], strict=True)):
            where = f"result {place} in {what}"
            if not isinstance(wanted, torch.Tensor):
                if type(value) is not type(wanted):
                    raise Fault("structure", f"{where} is a {type(value).__name__}, not a {type(wanted).__name__}")
                continue
            if type(value) is not torch.Tensor:
                lazy = isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__") or callable(value)
                text = f"{where} is a {type(value).__name__}, not a torch.Tensor"
                raise Fault("lazy" if lazy else "structure", text)
            if _form(value) != expected["forms"][place]:
                raise Fault("structure", f"{where} is {_form(value)}, not {expected['forms'][place]}")
            if found.places[place] != expected["places"][place]:
                on = found.places[place]
                text = "memory of its own" if on is None else f"the memory of argument {self._case.names(on)}"
                raise Fault("aliasing", f"{where} is on {text}")

    def _own_memory(self, first: Outcome, second: Outcome) -> None:
        known = {each.untyped_storage().data_ptr() for each in _fresh(first) if each.numel()}
        if any(each.untyped_storage().data_ptr() in known for each in _fresh(second) if each.numel()):
            if all(map(torch.equal, _tensors_of(first.values), _tensors_of(second.values))):
                raise Fault("cached", "a second call with other inputs returned the first call's result")
            raise Fault("reuses memory", "a second call returned the memory that the first call had returned")

    def _unchanged(self, what: str, found: Outcome) -> None:
        for place, (value, copy) in enumerate(zip(found.outputs, found.values, strict=True)):
            if isinstance(value, torch.Tensor) and found.places[place] is None:
                now, then = (each.contiguous().view(-1).view(torch.uint8) for each in (value, copy))
                if not torch.equal(now, then):
                    raise Fault("late work", f"result {place} of {what} changed after it was returned")

    def _original(self) -> None:
        """Whether the candidate calls the operator that it replaces, as PyTorch's profiler sees it."""
        task = self._judge.task
        if task.task["kind"] != "operator" or "calls the original" in task.options.allow:
            return
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            run(self._function, self._case, memories_of(self._case, self._case.contents))
        original = task.task["operator"]
        if any(event.name.rstrip("_") == original.rstrip("_") for event in profile.function_events):
            raise Fault("calls the original", f"it calls {original}")

    def _values(self, first: Outcome, second: Outcome | None, shifted: Outcome, clean: Outcome) -> None:
        off, off_shifted, off_clean = (self._off(CAPTURED, found) for found in (first, shifted, clean))
        if off is not None:
            if _hash(first) in self._judge.seen:
                raise Fault("cached", f"it returned what it had returned for other inputs: {off}", off)
            if off_clean is None or (off.not_finite and not off_clean.not_finite):
                with poisoned(True):  # and zeros beside the arguments
                    again = run(self._function, self._case, memories_of(self._case, self._case.contents, canary=0))
                if self._off(CAPTURED, again) is None:
                    raise Fault("reads outside", f"memory beside its arguments changes its outputs: {off}", off)
                raise Fault("uninitialized", f"memory that was never written changes its outputs: {off}", off)
            raise Fault("uncorrelated" if off.constant else "wrong", str(off), off)
        self._judge.seen.add(_hash(first))
        self._related(self._expected(CAPTURED), first)
        if self._other is not None and second is not None:
            off = self._off(self._other, second)
            if off is not None:
                if _same_values(first, second):
                    raise Fault("cached", f"a call with other inputs returned the first call's result: {off}", off)
                if off_shifted is not None or off_clean is not None:
                    raise Fault("computes once", f"a second call is wrong: {off}", off)
                raise Fault("captured values only", f"with other values of the same distribution: {off}", off)
        if off_shifted is not None:
            if off_clean is not None:
                raise Fault("computes once", f"a third call is wrong: {off_shifted}", off_shifted)
            raise Fault("alignment", f"at addresses that are aligned to one element only: {off_shifted}", off_shifted)
        if off_clean is not None:
            raise Fault("computes once", f"a fourth call is wrong: {off_clean}", off_clean)

    def _equal(self, variant: Variant, found: Outcome, reason: str) -> None:
        off = self._off(variant, found)
        if off is not None:
            raise Fault(reason, f"with {variant.name}: {off}", off)

    def _off(self, variant: Variant, found: Outcome) -> Difference | None:
        """The first output that is too far off."""
        return self._apart(self._expected(variant), variant.contents(self._case), found)

    def _apart(self, expected: dict[str, Any], contents: list[torch.Tensor], found: Outcome) -> Difference | None:
        wanted = _outputs(Outcome(values=expected["values"], after=expected["after"]), contents)
        got = _outputs(found, contents)
        results = len(expected["values"])
        for place, (one, other) in enumerate(zip(wanted, got, strict=True)):
            if place >= results and not expected["written"][place - results]:
                continue
            where = f"result {place}" if place < results else f"argument {self._case.names(place - results)}"
            off = difference(where, one, other, expected["tolerances"][place])
            if off is not None:
                return off
        return None

    def _related(self, expected: dict[str, Any], found: Outcome) -> None:
        """Raises Fault for a floating-point output that is within its tolerance for another reason than being right: it
        is constant, has nothing to do with the expected one, or is another multiple of it."""
        for place, (one, other) in enumerate(zip(expected["values"], found.values, strict=True)):
            if not isinstance(one, torch.Tensor) or not _is_number(one) or one.numel() < 4:
                continue
            wanted, got = wide(one.cpu()).reshape(-1), wide(other.cpu()).reshape(-1)
            where = f"result {place} is within the tolerance, and"
            if bool((got == got[0]).all()) and not bool((wanted == wanted[0]).all()):
                raise Fault("uncorrelated", f"{where} all its elements are {_number(got[0])}")
            if not expected["correlated"][place]:
                continue
            seen = correlation(wanted, got)
            if seen < 0.5:
                raise Fault("uncorrelated", f"{where} its correlation with the expected one is {seen:.2g}")
            finite = wanted.isfinite() & got.isfinite()
            wanted, got = wanted[finite], got[finite]
            square = float((wanted.conj() * wanted).real.sum())
            if wanted.numel() < 16 or not square:
                continue
            factor = float((wanted.conj() * got).real.sum()) / square
            # Errors that have nothing to do with each other hardly change the multiple.
            chance = 3 * expected["tolerances"][place] / math.sqrt(square)
            if abs(factor - 1) > 4 * float(torch.finfo(one.dtype).eps) + chance:
                raise Fault("wrong", f"{where} it is {factor:.4g} times the expected one")

    def measure(self, reference: Callable[..., Any]) -> dict[str, Any]:
        """Nanoseconds of calls of both, in alternation. Before each call its inputs change, at the same addresses, to
        values that they never had, so that nothing that is kept from an earlier one can be right; after some calls,
        which nobody can foretell, and after the last one the candidate's outputs are judged. Raises Fault."""
        variants = [CAPTURED] if self._other is None else [CAPTURED, self._other]
        inputs = _TimedInputs(self._case, [each.contents(self._case) for each in variants])
        options, flush = self._judge.task.options, None
        if options.cold_bytes:
            flush = torch.zeros(options.cold_bytes, dtype=torch.uint8, device=inputs.device)
        times: dict[str, list[int]] = {"candidate": [], "reference": []}
        sides = [("candidate", self._function), ("reference", reference)]
        for _warmup in range(2):
            took = {name: self._timed(each, reference, inputs, 1, None)[0] for name, each in sides}
        repeat = 1 if flush is not None else max(1, min(len(inputs.sets), 20_000 // max(min(took.values()), 1)))
        began, rounds, last, chance = time.perf_counter(), 0, False, random.SystemRandom()
        while not last:
            for name, each in sides if rounds % 2 else sides[::-1]:
                taken, returned, memories = self._timed(each, reference, inputs, repeat, flush)
                times[name].append(taken // repeat)
                if name == "reference":
                    continue
                spent = time.perf_counter() - began
                last = rounds + 1 >= _LEAST_ROUNDS and (spent > options.min_time_s or rounds + 1 >= _MOST_ROUNDS)
                if self._judges and (last or chance.random() < _JUDGED):
                    found = Outcome(values=leaves(returned), after=[memory.read() for memory in memories])
                    self._timed_rightly(reference, variants[inputs.now], inputs.contents(repeat - 1), found)
            rounds += 1
        return {
            "times_ns": times,
            "rounds": rounds,
            "calls_together": repeat,
            "inputs": "hot" if flush is None else "cold",
        }

    def _timed_rightly(
        self, reference: Callable[..., Any], variant: Variant, contents: list[torch.Tensor], found: Outcome
    ) -> None:
        there = run(reference, self._case, memories_of(self._case, contents))
        expected = self._expected(variant) | {"values": there.values, "after": there.after}
        off = self._apart(expected, contents, found)
        if off is not None:
            raise Fault("cached", f"in a timed call with inputs that had changed: {off}", off)

    def _timed(
        self,
        function: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: _TimedInputs,
        repeat: int,
        flush: torch.Tensor | None,
    ) -> tuple[int, Any, list[Memory]]:
        """Nanoseconds of calls on so many sets of inputs; what the last one returned, and its memory."""
        given = inputs.change(repeat)
        returned = None
        if flush is not None:
            flush.add_(1)
        _synchronize()
        try:
            with torch.no_grad():
                began = time.perf_counter_ns()
                for arguments in given:
                    returned = function(*arguments.positional, **arguments.named)
                _synchronize()  # every stream
                taken = time.perf_counter_ns() - began
        except Exception:
            contents = (inputs.contents(number) for number in range(repeat))
            if inputs.fresh and any(
                run(reference, self._case, memories_of(self._case, each)).error for each in contents
            ):
                inputs.fresh = False  # these values mean nothing to the original
                return self._timed(function, reference, inputs, repeat, flush)
            raise
        return taken, returned, inputs.sets[repeat - 1]


class _TimedInputs:
    """Some sets of inputs, each of which changes before it is used again. `now`: which contents they have; with `fresh`
    one element of each floating-point storage is another one, too, each time."""

    def __init__(self, case: Case, contents: list[list[torch.Tensor]]) -> None:
        size = sum(each.nbytes for each in contents[0])
        self._contents, self.now, self.fresh = contents, 0, True
        self._random = random.Random()
        self.sets = [memories_of(case, contents[0]) for _ in range(8 if size < _FEW_BYTES else 1)]
        self._changed: list[list[torch.Tensor]] = [[] for _ in self.sets]
        self._arguments = [Arguments(case, memories) for memories in self.sets]
        self.device = self.sets[0][0].tensor.device if self.sets[0] else torch.device("cpu")

    def change(self, count: int) -> list[Arguments]:
        """The first sets, with other contents than before."""
        self.now = (self.now + 1) % len(self._contents)
        for number, memories in enumerate(self.sets[:count]):
            self._changed[number] = [self._another(each) for each in self._contents[self.now]]
            for memory, content in zip(memories, self._changed[number], strict=True):
                memory.write(content)
        return self._arguments[:count]

    def contents(self, number: int) -> list[torch.Tensor]:
        """The contents of a set, as they were before the call."""
        return self._changed[number]

    def _another(self, content: torch.Tensor) -> torch.Tensor:
        if not (self.fresh and _is_float(content) and content.numel()):
            return content
        content = content.clone()
        places = [self._random.randrange(content.numel()) for _ in range(2)]
        content[places[0]] = content[places[1]] * self._random.uniform(0.5, 1.0)
        return content


def _hash(found: Outcome) -> int:
    flat = [each.cpu().contiguous() for each in _tensors_of(found.values)]
    return hash(tuple(ctypes.string_at(each.data_ptr() if each.numel() else 0, each.nbytes) for each in flat))


def _same_values(one: Outcome, other: Outcome) -> bool:
    pairs = zip(_tensors_of(one.values), _tensors_of(other.values), strict=True)
    return bool(one.values) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _tensors_of(values: list[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def _fresh(found: Outcome) -> list[torch.Tensor]:
    pairs = zip(found.outputs, found.places, strict=True)
    return [each for each, place in pairs if isinstance(each, torch.Tensor) and place is None]


def _form(value: Any) -> str:
    """What later work relies on in a result, as text; strides where they matter."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = tuple(value.shape)
    strides = [s if size != 1 and 0 not in sizes else "-" for size, s in zip(sizes, value.stride(), strict=True)]
    flags = "".join(f", {flag}" for flag, is_set in (("conj", value.is_conj()), ("neg", value.is_neg())) if is_set)
    name = str(value.dtype).removeprefix("torch.")
    return f"{name}{list(sizes)} with strides [{', '.join(map(str, strides))}] on {value.device}{flags}"


# ----------------------------------------------------------------------------------------------------------- processes


def split_candidate(given: str) -> tuple[str, str]:
    """A path and a function's name, "" for the task's."""
    path, colon, function = given.rpartition(":")
    return (path, function) if colon and os.path.exists(path) else (given, "")


class Task:
    """A task's folder with its reference, and what that does with every case."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = Path(os.path.realpath(folder)), options
        self.task = load_task(self.folder)
        self.workloads = [each for each in self.task["workloads"] if options.only in each["name"]]
        if not self.workloads:
            raise ValueError(f"--workload={options.only}: no workload has such a name")
        self.store: Path = Path()
        self.make: dict[str, Any] = {}  # how inputs without content are made

    def cases(self, make: Any) -> Iterator[Case]:
        for workload in self.workloads:
            for number in range(max(len(workload["cases"]), 1)):
                yield Case(self.folder, self.task, workload, number, make)

    def reference(self) -> Any:
        return import_file(self.folder / "reference.py", "reference")

    def prepare(self, tell: Callable[..., None]) -> None:
        """Run the reference on every case and variant; keeps what it does in the store."""
        module = self.reference()
        for case in self.cases(module.MAKE):
            function = module.PROGRAMS[case.workload["program"]]
            found = {CAPTURED.name: expectations(function, case, CAPTURED)}
            if found[CAPTURED.name]["error"]:
                tell(event="reference", case=case.name, wrong=found[CAPTURED.name]["error"])
                continue
            tell(event="reference", case=case.name, wrong=self._against_file(case, found[CAPTURED.name]))
            variants: list[Variant] = []
            for choices in variants_of(case, self.options.variants):
                for variant in choices:
                    if variant.sizes is not None and not survives(function, case, variant):
                        continue
                    there = expectations(function, case, variant)
                    if not there["error"]:
                        found[variant.name] = there
                        variants.append(variant)
                        break
            for name, there in found.items():
                torch.save(there, self._stored(case, name))
            names = [each.name for each in variants]
            (self.store / case.name).write_text(json.dumps(names), encoding="utf-8")

    def _against_file(self, case: Case, here: dict[str, Any]) -> str:
        """How the reference's outputs differ from those in the file. Where they agree, the file's are the expected
        ones."""
        outputs = case.outputs()
        for place, value in enumerate(here["values"]):
            kept = case.like(outputs, f"result.{place}", value) if isinstance(value, torch.Tensor) else None
            if kept is None:
                continue
            off = difference(f"result {place}", kept, value, here["tolerances"][place])
            if off is not None:
                return f"the reference gives other outputs here than in the capture: {off}"
            value.copy_(kept)
        for place, storage in enumerate(case.workload["storages"]):
            after = here["after"][place].view(case.contents[place].dtype)
            kept = case.like(outputs, f"written.{storage['entry'].removeprefix('input.')}", after)
            if kept is not None:
                tolerance = here["tolerances"][len(here["values"]) + place]
                off = difference(f"argument {case.names(place)}", kept, after, tolerance)
                if off is not None:
                    return f"the reference writes something else here than in the capture: {off}"
        return ""

    def _stored(self, case: Case, variant: str) -> Path:
        return self.store / f"{case.name} {variant.encode().hex()}"

    def variants(self, case: Case) -> list[Variant] | None:
        """The variants that the reference takes; None where it does not take the captured inputs."""
        path = self.store / case.name
        if not path.exists():
            return None
        names = json.loads(path.read_text(encoding="utf-8"))
        return [each for choices in variants_of(case, self.options.variants) for each in choices if each.name in names]

    def expected(self, case: Case, variant: Variant) -> dict[str, Any]:
        collects = gc.isenabled()
        gc.disable()
        try:
            found: dict[str, Any] = torch.load(self._stored(case, variant.name), weights_only=True)
        finally:
            if collects:
                gc.enable()
        gc.collect(0)  # what read it refers to it, and to itself
        return found


def judge_here(task: Task, given: str, tell: Callable[..., None], lock: Any) -> None:
    """Judge a candidate in this process, and measure it if it is right."""
    if given == REFERENCE:
        _measure_all(task, None, tell, lock)
        return
    judge = Judge(task, tell)
    try:
        function = judge.load(given)
    except Fault as fault:
        tell(event="fault", case="", reason=fault.reason, text=fault.text)
        return
    right, changes = True, judge.changes
    fcntl.flock(lock, fcntl.LOCK_SH)
    for case in task.cases(task.make):
        variants = task.variants(case)
        if variants is None:
            continue
        try:
            CaseJudge(judge, function, case, variants).judge()
            tell(event="right", case=case.name)
        except Fault as fault:
            right = False
            tell(**fault.event(case.name))
            if fault.reason in ("global state", "reads the task", "out of memory"):
                break
    fcntl.flock(lock, fcntl.LOCK_UN)
    if right:
        _measure_all(task, judge, tell, lock, function)
    changed = changes()
    if changed:
        tell(event="fault", case="", reason="global state", text=f"it changed {', '.join(changed[:4])}")


def _measure_all(task: Task, judge: Judge | None, tell: Callable[..., None], lock: Any, function: Any = None) -> None:
    """Time every workload; without a judge the reference against itself."""
    if task.options.min_time_s <= 0:
        return
    module = task.reference()
    judge = judge or Judge(task, tell)
    fcntl.flock(lock, fcntl.LOCK_EX)  # nothing else runs meanwhile
    for workload in task.workloads:
        reference = module.PROGRAMS[workload["program"]]
        case = Case(task.folder, task.task, workload, 0, task.make)
        tell(event="call", case=case.name, call="the timed calls")
        try:
            variants = None if function is None else task.variants(case)
            found = CaseJudge(judge, function or reference, case, variants).measure(reference)
            tell(event="timed", case=case.name, workload=workload["name"], **found)
        except Fault as fault:
            tell(**fault.event(case.name))
        except Exception as error:
            tell(event="fault", case=case.name, reason="raises", text=f"in a timed call: {_described(error)}")


def in_child(work: Callable[[Callable[..., None]], None], report: Path, options: Options) -> int:
    """Start work in a forked process that reports events to a file; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        output = os.open(f"{report}.out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        file = os.open(report, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        encode, write = json.dumps, os.write

        def tell(**event: Any) -> None:
            write(file, encode(event).encode() + b"\n")

        _limit_memory(options.memory_bytes)
        work(tell)
        tell(event="end")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _limit_memory(room: int) -> None:
    status = Path("/proc/self/statm")
    if room and status.exists():
        used = int(status.read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))


@dataclass
class Running:
    """A candidate's process."""

    given: str
    process: int
    report: Path
    until: float
    status: int | None = None
    timed_out: bool = False

    def poll(self) -> bool:
        """Whether it has ended; ends it when its time is up."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            self.status = status
            return True
        if time.monotonic() > self.until:
            self.timed_out = True
            os.killpg(self.process, signal.SIGKILL)
            _done, self.status = os.waitpid(self.process, 0)
            return True
        return False

    def events(self) -> list[dict[str, Any]]:
        if not self.report.exists():
            return []
        return [json.loads(line) for line in self.report.read_bytes().splitlines() if line.endswith(b"}")]

    def last_line(self) -> str:
        """The last line of its output."""
        said = Path(f"{self.report}.out")
        return (said.read_text(errors="replace").strip().splitlines() or [""])[-1] if said.exists() else ""


def judge_all(folder: Path, candidates: list[str], options: Options) -> dict[str, Any]:
    """Judge candidates, each in a process of its own. Raises ValueError and OSError for a task that cannot be read."""
    task = Task(folder, options)
    with tempfile.TemporaryDirectory(prefix="opreplay-judge-") as scratch:
        task.store = Path(os.path.realpath(scratch)) / "expected"
        task.store.mkdir()
        task.make = task.reference().MAKE
        report = Path(scratch) / "reference"
        first = Running("", in_child(task.prepare, report, options), report, math.inf)
        while not first.poll():
            time.sleep(0.005)
        events = first.events()
        if not any(each["event"] == "end" for each in events):
            raise ValueError(f"{folder}: the reference cannot be run: {first.last_line() or how_it_died(first)}")
        reference = {each["case"]: each["wrong"] for each in events if each["event"] == "reference"}
        return {
            "task": task.task["name"],
            "reference": {"ok": not any(reference.values()), "cases": reference},
            "candidates": _judge_in_turn(task, candidates, Path(scratch), options),
        }


def _judge_in_turn(task: Task, candidates: list[str], scratch: Path, options: Options) -> list[dict[str, Any]]:
    waiting = list(enumerate(candidates))
    running: dict[int, Running] = {}
    found: dict[int, dict[str, Any]] = {}
    lock_path = scratch / "lock"
    lock_path.touch()

    def start(number: int, given: str, options: Options, name: str = "") -> Running:
        report = scratch / f"candidate-{number}{name}"
        built = given != REFERENCE and not split_candidate(given)[0].endswith(".py")
        allowed = options.timeout_s * (3 if built else 1)

        def work(tell: Callable[..., None]) -> None:
            task.options = options
            with lock_path.open() as lock:
                judge_here(task, given, tell, lock)

        return Running(given, in_child(work, report, options), report, time.monotonic() + allowed)

    while waiting or running:
        while waiting and len(running) < max(options.jobs, 1):
            number, given = waiting.pop(0)
            running[number] = start(number, given, options)
        for number, each in list(running.items()):
            if each.poll():
                del running[number]
                found[number] = verdict_of(task, each)
                if options.guard and found[number]["verdict"] == "crashed":
                    found[number]["text"] += _behind_page(task, number, each, start, options)
        time.sleep(0.005)
    return [found[number] for number in range(len(candidates))]


def _behind_page(task: Task, number: int, dead: Running, start: Any, options: Options) -> str:
    """The argument and side whose page a kernel touched: only that page is unreadable, and the kernel dies again."""
    events = [each for each in dead.events() if each["event"] == "call"]
    if not events or "unreadable" not in events[-1]["call"]:
        return ""
    name = events[-1]["case"].rpartition(".")[0]
    workload = next(each for each in task.workloads if each["name"] == name)
    for side in ("after", "before"):
        for place, storage in enumerate(workload["storages"]):
            if f"({side})" not in events[-1]["call"]:
                continue
            changed = replace(options, pages=f"{place}:{side}", only=name)
            again = start(number, dead.given, changed, f"-{place}-{side}")
            while not again.poll():
                time.sleep(0.005)
            if os.WIFSIGNALED(again.status) and not again.timed_out:
                return f"; it touched memory {side} argument {', '.join(storage['arguments'])}"
    return ""


def how_it_died(each: Running) -> str:
    assert each.status is not None
    if os.WIFSIGNALED(each.status):
        return f"killed by {signal.Signals(os.WTERMSIG(each.status)).name}"
    return f"exited with {os.WEXITSTATUS(each.status)} before it was judged"


def verdict_of(task: Task, each: Running) -> dict[str, Any]:
    """What was found on one candidate."""
    events = each.events()
    faults = [event for event in events if event["event"] == "fault"]
    calls = [event for event in events if event["event"] == "call"]
    where = f" in {calls[-1]['call']} of {calls[-1]['case']}" if calls else ""
    if not any(event["event"] == "end" for event in events):
        reason = "out of time" if each.timed_out else "crashed"
        text = f"{how_it_died(each)}{where}" if reason == "crashed" else f"it was stopped{where}"
        last = each.last_line()
        if "MemoryError" in last or "bad_alloc" in last:
            reason = "out of memory"
        faults.append({"event": "fault", "case": calls[-1]["case"] if calls else "", "reason": reason, "text": text})
    elif each.given != REFERENCE and not faults:
        told = {kind: sum(event["event"] == kind for event in events) for kind in ("right", "timed")}
        cases = sum("." in path.name and " " not in path.name for path in task.store.iterdir())
        if told["right"] != cases or (task.options.min_time_s > 0 and told["timed"] != len(task.workloads)):
            text = f"it left after {told['right']} of {cases} cases, as if it had been judged"
            faults.append({"event": "fault", "case": "", "reason": "crashed", "text": text})
    allowed = [fault for fault in faults if fault["reason"] in task.options.allow]
    faults = [fault for fault in faults if fault["reason"] not in task.options.allow]
    order = list(REASONS)
    first = min(faults, key=lambda fault: order.index(fault["reason"])) if faults else None
    return {
        "candidate": each.given,
        "verdict": "accepted" if first is None else first["reason"],
        "text": "" if first is None else first["text"],
        "case": None if first is None else first["case"],
        "worst": None if first is None else first.get("worst"),
        "faults": faults,
        "allowed": allowed,
        "right": sum(event["event"] == "right" for event in events),
        "timed": [event for event in events if event["event"] == "timed"],
    }


def whole_workload(task: dict[str, Any], timed: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Nanoseconds of all calls of the workloads, with the candidate and with the reference."""
    calls = {each["name"]: each["calls"] for each in task["workloads"]}
    if not timed:
        return None
    sums = [
        sum(calls[each["workload"]] * statistics.median(each["times_ns"][side]) for each in timed)
        for side in ("candidate", "reference")
    ]
    return sums[0], sums[1]


def lines(task: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """The result as text."""
    wrong = {case: text for case, text in found["reference"]["cases"].items() if text}
    yield f"reference: {'as expected' if not wrong else 'NOT as expected'} in {len(found['reference']['cases'])} cases"
    yield from (f"  {case}: {text}" for case, text in wrong.items())
    for each in found["candidates"]:
        if each["verdict"] == "accepted":
            whole = whole_workload(task, each["timed"])
            speed = "" if whole is None else f", {whole[0] / whole[1]:.3f} of the reference's time over all calls"
            yield f"{each['candidate']}: accepted{speed}"
        else:
            where = f" ({each['case']})" if each["case"] else ""
            yield f"{each['candidate']}: REJECTED: {each['verdict']}{where}: {each['text']}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidates", nargs="*", metavar="KERNEL.py[:FUNCTION]")
    parser.add_argument("--task", default=os.path.dirname(os.path.abspath(__file__)), help="the task's folder")
    parser.add_argument(
        "--workload", dest="only", default="", metavar="TEXT", help="only workloads whose name contains this"
    )
    parser.add_argument("--variants", action="store_true", help="also with zeros, NaN, Inf, empty and odd sizes")
    parser.add_argument("--guard", action="store_true", help="also between unreadable pages")
    parser.add_argument("--allow", action="append", default=[], choices=list(REASONS), metavar="REASON")
    number: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    parser.add_argument("--min-time", dest="min_time_s", default=0.05, help="time each workload; 0: do not", **number)
    parser.add_argument("--timeout", dest="timeout_s", default=120.0, help="for each kernel", **number)
    number = {"type": int, "metavar": "BYTES"}
    parser.add_argument("--cold-bytes", default=0, help="rewrite so many bytes before each timed call", **number)
    parser.add_argument(
        "--memory-limit", dest="memory_bytes", default=8 << 30, help="of each kernel; 0: none", **number
    )
    parser.add_argument("--jobs", type=int, default=2, help="kernels that are judged at the same time")
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE")
    given = parser.parse_args(arguments)
    options = Options(**{name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__})
    for each in given.candidates:
        if each != REFERENCE and not os.path.exists(split_candidate(each)[0]):
            parser.error(f"{each}: there is no such file")
    try:
        found = judge_all(Path(given.task), given.candidates, options)
        task = load_task(Path(given.task))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in lines(task, found):
        print(line)
    rejected = any(each["verdict"] != "accepted" for each in found["candidates"])
    return int(rejected or not found["reference"]["ok"])


if __name__ == "__main__":
    sys.exit(main())
