"""The launches of a captured Triton kernel as its PTX takes them: grid, block, shared memory, parameters as bytes.

Parameters follow what the kernel was compiled for, which its metadata tell: a pointer for each tensor, a number for
each scalar, nothing for what is a constant of the code; then the scratch memory that Triton adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import METADATA, contents_of, parse_metadata
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Kernel
from replayfmt.format.reader import CaptureReader
from replayfmt.probes.instrumenting import NO_PTX
from replayfmt.probes.ptx.parsing import PtxEntry, PtxError, PtxModule, parse_ptx
from replayfmt.probes.recordings.results import MOST_THREADS, LaunchShape
from replayfmt.pytorch.schemas import parse_schema
from replayfmt.pytorch.triton.compiled import attached_stages, compiled_metadata
from replayfmt.pytorch.triton.kernels import StoredKernel
from replayfmt.replay.run.isolated import IsolatedCall

Value = np.generic
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}
_NUMBERS: dict[str, type[np.generic]] = {
    "i1": np.int8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u1": np.uint8, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "f32": np.float32, "fp64": np.float64,
}  # fmt: skip
# The parameters that Triton adds after the kernel's own, each the address of memory of so many bytes.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
_REQUIRED_BLOCK = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch before it is made: its op in the capture, and its shape."""

    ordinal: int
    shape: LaunchShape


class LaunchableKernel:
    """A Triton kernel of a capture, with its PTX: that in the capture, or that of what a replay launched here."""

    def __init__(self, reader: CaptureReader, kernel: Kernel, launched: Any = None) -> None:
        """`launched`: Triton's object of what a replay launched of it. Raises PtxError without PTX, ReplayRefused for a
        kernel that cannot be launched from here, with the reason, and InvalidCapture for damage."""
        self.name = kernel.qualified_name
        self._kernel = kernel
        contents = contents_of(reader, kernel)
        if launched is not None:
            made, metadata = (dict(attached_stages(launched)), compiled_metadata(launched, lambda _function: None))
        else:
            made, metadata = contents, parse_metadata(contents.get(METADATA, b"{}"), f"{reader.path}: {self.name}")
        if kernel.kind is not KernelKind.triton or "ptx" not in made:
            raise PtxError(f"{reader.path}: {self.name}: {NO_PTX}")
        try:
            self._stored = StoredKernel.read(contents)
            self.module: PtxModule = parse_ptx(made["ptx"].decode())
        except (ValueError, PtxError) as error:
            raise PtxError(f"{reader.path}: {self.name}: {error}") from None
        compiled = self._object(metadata, "compiled")
        self._names = [argument.name for argument in parse_schema(kernel.schema).arguments]
        self.entry: PtxEntry = self.module.entry(compiled.get("name"))
        self._signature = self._object(self._object(metadata, "specialization"), "signature")
        self._warps = self._number(compiled, "num_warps", at_least=1)
        self._shared_bytes = self._number(compiled, "shared")
        if self._number(compiled, "num_ctas", default=1) != 1:
            raise self._refused("its blocks are launched in clusters")
        if any(self._number(compiled, name, default=0) for name in _SCRATCH):
            raise self._refused("it needs scratch memory beside its arguments")
        for flag in ("launch_cooperative_grid", "launch_pdl"):
            if compiled.get(flag):
                raise self._refused(f"it is launched in a way of its own ({flag})")
        self._block = (self._warps * 32, 1, 1)
        head = self.module.text[: self.entry.body_begin]
        found = _REQUIRED_BLOCK.search(head, self.entry.parameters_end)
        if found is not None:
            wanted = tuple(int(size or 1) for size in found.groups())
            if wanted != self._block:
                raise self._refused(f"its PTX is for blocks of {wanted} threads, its metadata say {self._block}")
        if self._block[0] > MOST_THREADS:
            raise self._refused(f"its metadata say blocks of {self._block[0]:,} threads")

    def launches(self, reader: CaptureReader, at_most: int | None) -> list[PlannedLaunch]:
        """The launches of the kernel in the capture, the first `at_most` of them. Raises ReplayRefused if there is
        none, or one with a grid that no device takes."""
        found: list[PlannedLaunch] = []
        for record in reader.records():
            if record.kind is RecordKind.op and reader.kernels[record.signature.kernel] is self._kernel:
                found.append(PlannedLaunch(record.ordinal, self.shape(record.argument(self._stored.grid))))
                if len(found) == at_most:
                    break
        if not found:
            raise self._refused(f"{reader.path} has no launch of it")
        return found

    def shape(self, grid: Any) -> LaunchShape:
        """The shape of a launch with a grid of one to three sizes. Raises ReplayRefused."""
        sizes = tuple(grid) if isinstance(grid, list | tuple) else ()
        if not 1 <= len(sizes) <= 3 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
            raise self._refused(f"expected a grid of one to three sizes from 1 on, got {str(grid)[:60]}")
        x, y, z = (*sizes, 1, 1)[:3]
        return LaunchShape((x, y, z), self._block, self._shared_bytes)

    def parameters(self, call: IsolatedCall) -> list[Value]:
        """The parameters of one launch, each as wide as the PTX has it. Raises ReplayRefused for arguments that the
        kernel was not compiled for."""
        values = self._values(call)
        packed: list[Value] = []
        for parameter, kind in self._signature.items():
            kinds = list(_leaves(kind))
            if all(each == "constexpr" for each in kinds):
                continue
            given = list(self._given(self._stored.parameters.get(parameter), values))
            if len(given) != len(kinds):
                raise self._refused(f"its parameter {parameter} was compiled for {len(kinds)} values, not {len(given)}")
            packed += [
                self._packed(parameter, each, value)
                for each, value in zip(kinds, given, strict=True)
                if each != "constexpr"
            ]
        added = len(self.entry.parameters) - len(packed)
        if not 0 <= added <= len(_SCRATCH):
            raise self._refused(
                f"its PTX takes {len(self.entry.parameters)} parameters, its metadata say {len(packed)}"
            )
        packed += [np.uint64(0)] * added  # it needs no bytes of them
        for parameter_of_ptx, value in zip(self.entry.parameters, packed, strict=True):
            width = _WIDTHS.get(re.sub(r"\D", "", parameter_of_ptx.kind.split()[0]), 0)
            if width != value.nbytes:
                raise self._refused(
                    f"its PTX takes {parameter_of_ptx.kind} as {parameter_of_ptx.name}, "
                    f"its metadata say {value.nbytes} bytes"
                )
        return packed

    def tensors(self, call: IsolatedCall) -> dict[str, torch.Tensor]:
        """The tensors among the arguments of a launch, by the name of the argument."""
        return {name: value for name, value in self._values(call).items() if isinstance(value, torch.Tensor)}

    def _values(self, call: IsolatedCall) -> dict[str, Any]:
        return {**dict(zip(self._names, call.arguments, strict=False)), **call.named}

    def _given(self, form: Any, values: Mapping[str, Any]) -> Iterator[Any]:
        """The values of a parameter, from its form (`replayfmt.pytorch.triton.forms`)."""
        match form:
            case str(name):
                yield values[name]
            case {"reinterpret": str(name)}:
                yield values[name]
            case {"tuple": list(parts)} | {"list": list(parts)}:
                for part in parts:
                    yield from self._given(part, values)
            case {"constexpr": _} | {"dtype": _} | {"function": _}:
                yield None
            case _:
                raise self._refused("it takes tensor descriptors, which are not addresses")

    def _packed(self, parameter: str, kind: str, value: Any) -> Value:
        if kind.startswith("*"):
            if not isinstance(value, torch.Tensor):
                raise self._refused(f"it takes an address as {parameter}, not {type(value).__name__}")
            return np.uint64(value.data_ptr())
        if kind == "bf16":
            return np.uint16(torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16).item())
        number = _NUMBERS.get(kind)
        takes = (int, float) if kind in ("fp16", "fp32", "f32", "fp64") else int
        if number is None or not isinstance(value, takes):
            raise self._refused(f"its parameter {parameter} is of the type {kind}, and is given {type(value).__name__}")
        try:
            with np.errstate(over="ignore"):
                return number(value)
        except OverflowError:
            raise self._refused(f"its parameter {parameter} is of the type {kind}, and is given {value}") from None

    def _refused(self, why: str) -> ReplayRefused:
        return ReplayRefused(f"{self.name} cannot be probed: {why}")

    def _object(self, table: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = table.get(name)
        if not isinstance(value, dict):
            raise self._refused(f"its metadata have no {name}")
        return value

    def _number(self, table: Mapping[str, Any], name: str, *, at_least: int = 0, default: int | None = None) -> int:
        value = table.get(name, default)
        if type(value) is not int or not at_least <= value < 1 << 31:
            raise self._refused(f"its metadata have no {name}, or one that cannot be ({str(value)[:20]})")
        return value


def _leaves(kind: Any) -> Iterator[str]:
    if isinstance(kind, list | tuple):
        for each in kind:
            yield from _leaves(each)
    else:
        yield str(kind)
