"""Triton kernels of a trace, found in the cache of the Inductor that generated them.

Inductor names a source after the hash of its text. A source is used only if its text has the hash that the trace gives.
It is read as text: nothing of it is imported or run. What a replay runs, with the user's leave, is the source without
Inductor's autotuner; the trace has the configuration that the autotuner chose.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import torch

from replayfmt.errors import UsageError
from replayfmt.format.codes import ITEM_BYTES, DType, StorageOrigin
from replayfmt.format.model import Recipe, Statistics
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE
from replayfmt.pytorch.triton.accesses import Accesses
from replayfmt.pytorch.triton.kernels import TRACED, FormMaker, KernelCode, NotRepresentable
from replayfmt.pytorch.triton.sources import StandaloneSource, edited

from .arguments import ArgumentForm, RecordedArgument, TensorSpec
from .synthesis import Tensor, bytes_needed, contiguous

_HASH = re.compile(r"c[a-z2-7]{51}\Z")
_MOST_BYTES = 16 << 20
_TUNERS = "triton_heuristics"
_DRIVER = "triton_helpers.set_driver_to_gpu"
_WAITING = "cooperative_reduction"
_POINTERS = {
    "*fp64": DType.float64,
    "*fp32": DType.float32,
    "*fp16": DType.float16,
    "*bf16": DType.bfloat16,
    "*fp8e4nv": DType.float8_e4m3fn,
    "*fp8e5": DType.float8_e5m2,
    "*fp8e4b8": DType.float8_e4m3fnuz,
    "*fp8e5b16": DType.float8_e5m2fnuz,
    "*i64": DType.int64,
    "*i32": DType.int32,
    "*i16": DType.int16,
    "*i8": DType.int8,
    "*i1": DType.bool,
    "*u8": DType.uint8,
    "*u16": DType.uint16,
    "*u32": DType.uint32,
    "*u64": DType.uint64,
}
_NUMBERS = {"i": int, "u": int, "f": float, "b": float}  # by the first letter of a parameter's type
_GRIDS = {"Grid1D": "x", "Grid2D": "xy", "Grid3D": "xyz"}
_INTEGERS = frozenset(each for kind, each in _POINTERS.items() if kind[1] in "iu" and each is not DType.bool)
ZEROS = "its integers are 0, so that no index leaves a tensor"


class NoKernel(Exception):
    """A launch of a trace cannot be made a kernel. The text says why."""


class TracedLaunch(NamedTuple):
    """The kernel of a launch, and its arguments by name in the order of its schema. `assumed` are sentences."""

    code: KernelCode
    arguments: tuple[tuple[str, Any], ...]
    assumed: tuple[str, ...]


class InductorCache:
    """A directory that Inductor has written (TORCHINDUCTOR_CACHE_DIR), or one with the sources alone."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Raises UsageError if there is no such directory."""
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise UsageError(
                f"--inductor-cache={self.folder}: no such directory; give the cache of the traced program, "
                "TORCHINDUCTOR_CACHE_DIR there, by default /tmp/torchinductor_USER"
            )
        self._sources: dict[tuple[str, str], InductorSource] = {}

    def text(self, name: str, file: str) -> str:
        """The source that a trace means by a hash and a file's name, either "" if it has none. Raises NoKernel."""
        stem = os.path.splitext(re.split(r"[/\\]", file)[-1])[0]
        if name and stem and name != stem:
            raise NoKernel(f"the trace gives it the hash {name!a} and the file {file!a}, which are not of one source")
        name = name or stem
        if not _HASH.match(name):
            raise NoKernel(f"{name!a} is not the hash of a source of Inductor's")
        found = [
            path
            for path in (os.path.join(self.folder, name[1:3], f"{name}.py"), os.path.join(self.folder, f"{name}.py"))
            if os.path.isfile(path)
        ]
        if not found:
            raise NoKernel(f"{self.folder} has no {name[1:3]}/{name}.py")
        try:
            with open(found[0], "rb") as file_there:
                content = file_there.read(_MOST_BYTES + 1)
            text = content.decode()
        except (OSError, ValueError) as error:
            raise NoKernel(f"{found[0]} cannot be read ({error})") from None
        if len(content) > _MOST_BYTES:
            raise NoKernel(f"{found[0]} has more than {_MOST_BYTES >> 20} MiB")
        if code_hash(text) != name:
            raise NoKernel(f"{found[0]} is not what the trace ran: its text has the hash {code_hash(text)}")
        return text

    def launch(
        self,
        kernel: str,
        said: Mapping[str, Any],
        arguments: Sequence[RecordedArgument],
        grid: tuple[int, ...] | None,
        device: str,
    ) -> TracedLaunch:
        """A launch of the kernel `kernel`: what the trace said of it, its arguments, the grid of its device work and
        the device. Raises NoKernel."""
        text = self.text(str(said.get("kernel_hash") or ""), str(said.get("kernel_file") or ""))
        if (text, kernel) not in self._sources:
            self._sources[text, kernel] = InductorSource(text, kernel)
        try:
            return self._sources[text, kernel].launch(said, arguments, grid, device)
        except NotRepresentable as problem:
            raise NoKernel(str(problem)) from None


def code_hash(text: str) -> str:
    """What Inductor names a source after."""
    digest = hashlib.sha256(text.strip().encode()).digest()
    return "c" + base64.b32encode(digest)[:51].decode().lower()


@dataclass(frozen=True)
class InductorSource:
    """The source of one kernel as Inductor writes it: a function under an autotuner, whose arguments describe it.
    `name`: the kernel's in a trace, which need not be the function's."""

    text: str
    name: str

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NoKernel(f"its source cannot be parsed ({error})") from None

    @cached_property
    def _function(self) -> ast.FunctionDef:
        functions = [each for each in self._tree.body if isinstance(each, ast.FunctionDef)]
        found = [each for each in functions if self._tuner(each) is not None]
        if len(found) != 1:
            raise NoKernel(f"its source has {len(found)} kernels under an autotuner of Inductor's, expected one")
        return found[0]

    @staticmethod
    def _tuner(function: ast.FunctionDef) -> ast.Call | None:
        """The decorator of Inductor's."""
        calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
        return next((each for each in calls if ast.unparse(each.func).startswith(f"{_TUNERS}.")), None)

    def _said(self, about: str) -> dict[str, Any]:
        """What the autotuner is given as a dictionary, of it what is a literal."""
        tuner = self._tuner(self._function)
        assert tuner is not None
        node = next((each.value for each in tuner.keywords if each.arg == about), None)
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            try:
                found[ast.literal_eval(key) if key is not None else ""] = ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError):
                continue  # DeviceProperties(…) and others that this does not need
        return found

    @cached_property
    def module(self) -> StandaloneSource:
        """The source as a replay loads it: the kernel without its autotuner."""
        tuner = self._tuner(self._function)
        assert tuner is not None
        if ast.unparse(tuner.func) == f"{_TUNERS}.{_WAITING}":
            raise NoKernel("its programs wait for each other, for which a replay would have to launch them all at once")
        calls = [each.value for each in self._tree.body if isinstance(each, ast.Expr)]
        unwanted = [each for each in calls if isinstance(each, ast.Call) and ast.unparse(each.func) == _DRIVER]
        edits = [  # with the @ of the decorator
            (each.lineno, each.col_offset - (each is tuner), each.end_lineno or 0, each.end_col_offset or 0, "")
            for each in (tuner, *unwanted)
        ]
        names = (self._function.name, self._said("inductor_meta").get("kernel_name"))
        if self.name not in names:
            raise NoKernel(f"its source has the kernel {names[0]!a}, not {self.name!a}")
        return StandaloneSource(edited(self.text, edits), names[0], {}, {}, ())

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """The kernel's parameters, and whether each is a constexpr."""
        given = self._function.args
        if given.vararg or given.kwarg:
            raise NoKernel("it takes any number of arguments")
        return {
            each.arg: each.annotation is not None and ast.unparse(each.annotation).endswith("constexpr")
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
        }

    @cached_property
    def _types(self) -> dict[str, str]:
        """The type of each parameter as Inductor compiled it."""
        return {name: str(kind) for name, kind in self._of_parameters("signature").items()}

    def _of_parameters(self, what: str) -> dict[str, Any]:
        """What the source says of each parameter; older versions number them."""
        said, names = self._said("triton_meta").get(what), list(self.parameters)
        if not isinstance(said, dict):
            raise NoKernel(f"its source does not say the {what} of its parameters")
        return {
            names[key] if isinstance(key, int) and 0 <= key < len(names) else str(key): value
            for key, value in said.items()
        }

    @cached_property
    def _accesses(self) -> Accesses:
        """A pointer is only read where all that uses it is `tl.load` of an address made of it, and surely written where
        a store's or an atomic operation's address is made of it. Of others it is assumed that they are written."""
        uses: dict[str, list[str]] = {name: [] for name in self.parameters}
        for use, name in _uses_of_names(self._function.body):
            if name in uses:
                uses[name].append(use)
        written = frozenset(name for name, ways in uses.items() if any(way != "load" for way in ways))
        stored = frozenset(name for name, ways in uses.items() if "store" in ways)
        words = {each.attr for each in ast.walk(self._tree) if isinstance(each, ast.Attribute)}
        return Accesses(written, stored, bool(words & {"pointer_type", "inline_asm_elementwise"}), frozenset(), None)

    def launch(
        self, said: Mapping[str, Any], arguments: Sequence[RecordedArgument], grid: tuple[int, ...] | None, device: str
    ) -> TracedLaunch:
        chosen = _configuration(str(said.get("kernel_kwargs") or ""))
        types, accesses = self._types, self._accesses
        given = self._given(arguments, chosen)
        values: dict[str, Any] = {}
        specs: dict[str, TensorSpec] = {}
        for name in self.parameters:
            if name in given and (spec := given[name].tensor) is not None:
                specs[name] = replace(spec, device=device)
                values[name] = _as_meta(name, spec, types.get(name, ""))
            elif name in given:
                values[name] = _number(name, given[name], types.get(name, ""))
            else:
                values[name] = chosen[name]
        self._check_grid(grid, values)
        assert grid is not None
        assumed = ["each of its tensors has memory of its own"]
        options = {}
        for name in ("num_warps", "num_stages"):
            value = said.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                options[name] = value
            else:
                assumed.append(f"{name} is Triton's default: the trace does not say it")
        form = FormMaker(
            self.parameters, (name for name, constexpr in self.parameters.items() if constexpr), self.module
        )
        laid = form.lay_out(values, options, grid)
        code = KernelCode.of_launch(
            self.name, self.module, laid, accesses, str(said.get("kernel_kwargs") or ""), target=TRACED
        )
        if any(spec.dtype in _INTEGERS for spec in specs.values()):
            assumed.append(ZEROS)
        called = tuple(
            (name, specs[laid.owner[name]] if isinstance(value, torch.Tensor) else value)
            for name, value in laid.arguments.items()
        )
        return TracedLaunch(code, called, tuple(assumed))

    def _given(self, arguments: Sequence[RecordedArgument], chosen: dict[str, Any]) -> dict[str, RecordedArgument]:
        """The recorded arguments by parameter. What has no argument must have been chosen or be a constant."""
        names = [name for name in self.parameters if name not in chosen]
        if len(names) != len(arguments):
            known = self._of_parameters("constants")
            chosen |= {name: known[name] for name in names if name in known}
            names = [name for name in names if name not in known]
        if len(names) != len(arguments):
            raise NoKernel(
                f"the trace has {len(arguments)} arguments and the configuration {chosen}, its source the parameters "
                f"{', '.join(self.parameters)}"
            )
        return dict(zip(names, arguments, strict=True))

    def _check_grid(self, grid: tuple[int, ...] | None, values: Mapping[str, Any]) -> None:
        """The grid of the device work must be what the source's own rule makes of the arguments."""
        if grid is None:
            raise NoKernel("the trace has no one kernel with a grid that it launched")
        axes = _GRIDS.get(str(self._said("inductor_meta").get("grid_type")), "")
        expected = [_blocks(values.get(f"{axis}numel"), values.get(f"{axis.upper()}BLOCK")) for axis in axes]
        if None not in expected and axes and [*expected, 1, 1][:3] != [*grid, 1, 1][:3]:
            raise NoKernel(f"the trace launched the grid {list(grid)}, its source and arguments make it {expected}")


def _blocks(elements: Any, block: Any) -> int | None:
    if not isinstance(elements, int) or not isinstance(block, int) or block <= 0:
        return None
    return -(-elements // block)


def _uses_of_names(body: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Every name that is used, and how: in the address of a `load` or of a `store`, or otherwise."""
    stack: list[tuple[ast.AST, str]] = [(each, "") for each in body]
    while stack:
        node, way = stack.pop()
        if isinstance(node, ast.Name):
            yield way, node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            called = ast.unparse(node.func)
            within = "load" if called == "tl.load" else ""
            within = "store" if called == "tl.store" or called.startswith("tl.atomic_") else within
            stack.append((node.args[0], within))
            stack += [(each, "") for each in (node.func, *node.args[1:], *(each.value for each in node.keywords))]
        else:
            stack += [(each, way) for each in ast.iter_child_nodes(node)]


def _configuration(text: str) -> dict[str, Any]:
    """`XBLOCK=2,R0_BLOCK=2048` as values."""
    chosen: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise NoKernel(f"the trace gives the configuration {text!a}, which is not NAME=VALUE,…")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError):
            chosen[name] = value
    return chosen


def _as_meta(name: str, spec: TensorSpec, kind: str) -> torch.Tensor:
    """A tensor of the recorded form without memory."""
    if spec.dtype is None or spec.sizes is None or spec.dtype is not _POINTERS.get(kind):
        recorded = spec.dtype.name if spec.dtype is not None else "of an unknown type"
        raise NoKernel(f"its source takes {kind or 'nothing'} as {name}, the trace has a tensor {recorded}")
    strides = contiguous(spec.sizes) if spec.strides is None else spec.strides
    try:
        bytes_needed(spec.dtype, spec.sizes, strides)
        return torch.empty_strided(spec.sizes, strides, dtype=TORCH_DTYPE[spec.dtype], device="meta")
    except (RuntimeError, ValueError) as error:
        raise NoKernel(f"its argument {name}: {spec.lacks or error}") from None


def _number(name: str, given: RecordedArgument, kind: str) -> Any:
    value, wanted = given.value, _NUMBERS.get(kind[:1])
    if given.form is ArgumentForm.number and kind == "constexpr":
        return value
    if given.form is ArgumentForm.number and wanted is not None and isinstance(value, wanted | int):
        return value if kind == "i1" else wanted(value)
    raise NoKernel(f"its source takes {kind or 'nothing'} as {name}, the trace has {given.shown or 'no value'}")


def fill_integers(tensors: Sequence[Tensor], seed: int) -> None:
    """Make the integers of these tensors 0: a kernel may use them as indices, whose range the trace does not have."""
    for place, tensor in enumerate(tensors):
        storage, dtype = tensor.storage, tensor.meta.dtype
        if storage is not None and storage.bytes and dtype in _INTEGERS:
            storage.origin = StorageOrigin.initializer
            elements = storage.bytes // ITEM_BYTES[dtype]
            zeros = Statistics(0.0, 0.0, 0.0, 0.0, elements, 0, 0, 0)
            storage.content = Recipe(dtype, elements, seed * 64 + place, zeros)
