"""Replays every operator call of event_replay_ir.json by itself, and prints how long each takes. Needs only PyTorch.

    python replay.py [event_replay_ir.json] [--device=cpu] [--op-filter=TEXT] [--op-limit=N] [--verbose]

Each call gets inputs of the recorded dtypes, shapes and strides. Integers and booleans have their content from
integers.json beside the file, or zeros; everything else is synthesized. Exit code 1 if a call failed.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

try:
    import torch
except ImportError as lacking:
    sys.exit(f"this needs PyTorch, which cannot be imported here: {lacking}")

DTYPES: dict[str, torch.dtype] = {
    "unsigned char": torch.uint8,
    "signed char": torch.int8,
    "short int": torch.int16,
    "int": torch.int32,
    "long int": torch.int64,
    "c10::Half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bool": torch.bool,
    "c10::BFloat16": torch.bfloat16,
    "c10::complex<c10::Half>": torch.complex32,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}
for _name in (
    "Float8_e5m2",
    "Float8_e4m3fn",
    "Float8_e5m2fnuz",
    "Float8_e4m3fnuz",
    "Float8_e8m0fnu",
    "Float4_e2m1fn_x2",
):
    if hasattr(torch, _name.lower()):
        DTYPES[f"c10::{_name}"] = getattr(torch, _name.lower())
for _bits in (16, 32, 64):
    DTYPES[f"uint{_bits}_t"] = getattr(torch, f"uint{_bits}")
# PyTorch's numbers for these enumerations, as traces store them.
_SCALAR_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32 "
    "bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz "
    "float8_e4m3fnuz uint16 uint32 uint64 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 "
    "float8_e8m0fnu float4_e2m1fn_x2"
)
SCALAR_TYPES = _SCALAR_NAMES.split()
_LAYOUT_NAMES = "strided sparse_coo sparse_csr _mkldnn sparse_csc sparse_bsr sparse_bsc jagged"
LAYOUTS = [getattr(torch, _layout) for _layout in _LAYOUT_NAMES.split()]
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]


# Operators that do more than compute on tensors; --allow-operator runs one anyway. Written by the export.
REFUSED_NAMESPACES: tuple[str, ...] = ()
REFUSED_OPERATORS: tuple[str, ...] = ()


INTEGERS = "integers.json"


class Inputs:
    """The arguments of one call. Tensors that shared memory share it."""

    def __init__(self, device: str | None, integers: dict[str, Any]) -> None:
        self.device = device
        self.integers = integers
        self.memory: dict[int, torch.UntypedStorage] = {}

    def value(self, kind: str, value: Any, more: Any, label: str = "") -> Any:
        """An argument from its type, its value and what stands beside it."""
        base = kind.split("(")[0].rstrip("?")
        if base.endswith("]") and isinstance(value, list) and not kind.startswith("Tensor"):
            return [self.value(base[: base.rindex("[")], each, None) for each in value]
        if isinstance(value, dict) and "shape" in value:
            return self.tensor(value, more or {}, label)
        if kind.startswith("Tensor") and isinstance(value, list):
            beside = more if isinstance(more, list) else [None] * len(value)
            return [
                None if each is None else self.tensor(each, own or {}, f"{label}[{place}]")
                for place, (each, own) in enumerate(zip(value, beside, strict=True))
            ]
        if isinstance(value, str) and base in ("Scalar", "complex", "number", "Any"):
            return complex(value)
        if isinstance(value, str) and base == "Device":
            return torch.device(self.device or value)
        if isinstance(value, int) and not isinstance(value, bool):
            if base == "ScalarType":
                return getattr(torch, SCALAR_TYPES[value])
            if base == "Layout":
                return LAYOUTS[value]
            if base == "MemoryFormat":
                return MEMORY_FORMATS[value]
        return value

    def tensor(self, spec: dict[str, Any], more: dict[str, Any], label: str) -> torch.Tensor:
        """A tensor of the recorded geometry, for the argument `label`."""
        dtype = dtype_of(spec.get("dtype"))
        device = torch.device(self.device or more.get("device") or accelerator() or "cpu")
        sizes = list(spec["shape"])
        strides = spec.get("strides")
        if strides is None:
            strides = torch.empty(sizes, device="meta").stride()
        offset = int(more.get("offset", 0))
        last = 0 if 0 in sizes else 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        length = (offset + last) * dtype.itemsize
        number = more.get("storage")
        storage = self.memory.get(number) if number is not None else None
        if storage is None or storage.nbytes() < length:
            storage = torch.UntypedStorage(max(length, int(more.get("storage_bytes", 0))), device=device)
            self.fill(storage, dtype, spec.get("init"), device)
            if number is not None:
                self.memory[number] = storage
        tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, sizes, strides)
        if label in self.integers:
            once = [size if step else 1 for size, step in zip(sizes, strides, strict=True)]
            tensor.as_strided(once, strides).copy_(content(self.integers[label], dtype, once))
        for flag in more.get("flags", ()):
            tensor = {"conj": torch.conj, "neg": torch._neg_view}[flag](tensor)
        return tensor

    def fill(self, storage: torch.UntypedStorage, dtype: torch.dtype, init: Any, device: torch.device) -> None:
        """Synthesized content: normally distributed numbers, and zeros where they may be indices."""
        count = storage.nbytes() // dtype.itemsize
        if not count:
            return
        flat = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, [count], [1])
        if init == "ones" and dtype == DTYPES.get("c10::Float4_e2m1fn_x2"):
            flat.view(torch.uint8).fill_(0x22)  # two ones a byte
        elif str(dtype).removeprefix("torch.").lstrip("u") in [f"int{bits}" for bits in range(1, 8)]:
            # A byte each, and no kernels.
            flat.view(torch.uint8).fill_(1 if init == "ones" else 0)
        elif init == "ones":
            flat.fill_(1)
        elif dtype.is_floating_point or dtype.is_complex:
            if init == "zeros" or dtype.itemsize == 1:
                flat.view(torch.uint8).zero_() if dtype.itemsize == 1 else flat.zero_()
            elif dtype == torch.complex32:
                torch.view_as_real(flat).normal_()
            else:
                flat.normal_()
        else:
            flat.zero_()


def content(text: Any, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    """The elements that integers.json has for a tensor. Raises ValueError if they are not those of the tensor."""
    length = math.prod(sizes) * dtype.itemsize
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(text, validate=True), length + 1)
    except (TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"{INTEGERS}: {error}") from None
    if len(data) != length:
        raise ValueError(f"{INTEGERS}: the content has not the {length} bytes of the tensor")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(sizes)


def integers_beside(path: str) -> dict[str, Any]:
    """The entries of integers.json beside a file, by entry number. Raises ValueError and OSError."""
    beside = Path(path).with_name(INTEGERS)
    if not beside.exists():
        return {}
    found = json.loads(beside.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError(f"{INTEGERS}: expected an object of objects")
    return found


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name as traces print it, or as PyTorch calls it. Raises ValueError."""
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = getattr(torch, name.removeprefix("torch.").removeprefix("c10::").lower(), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this PyTorch, {torch.__version__}, has no dtype {name!a}")
    return found


def registered(name: str, overload: str) -> bool:
    """Whether PyTorch's dispatcher has an operator; "" is the overload without a name."""
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


PLAIN = "callable"  # the overload of what is no operator but a function of a library


def plain_function(name: str, libraries: Sequence[str]) -> Any:
    """A function that a library itself defines, which the user named for just this namespace."""
    namespace, _separator, base = name.partition("::")
    for library in libraries:
        named, _separator, module = library.partition("=")
        found = vars(importlib.import_module(module)).get(base) if named == namespace else None
        if isinstance(found, FunctionType) and found.__module__ == module:
            return found
    raise ValueError(f"{name!a} is a plain function; --op-library={namespace}=MODULE names the library that defines it")


def operator(entry: dict[str, Any], allowed: Sequence[str] = (), libraries: Sequence[str] = ()) -> Any:
    """The operator of an entry, from the dispatcher's registry. Names of the file are looked up nowhere else, so that
    no file reaches a Python function through one, but in `libraries`. Which overload it was is not in the IR of other
    tools."""
    name, overload = entry["op_name"], (entry.get("opreplay") or {}).get("overload")
    if not (isinstance(name, str) and isinstance(overload, str | None)):
        raise ValueError("op_name and overload must be strings")
    if (name in REFUSED_OPERATORS or name.partition("::")[0] in REFUSED_NAMESPACES) and name not in allowed:
        raise ValueError(f"{name!a} does more than compute on tensors; --allow-operator={name} runs it anyway")
    if overload == PLAIN:
        return plain_function(name, libraries)
    if overload is not None:
        overload = "" if overload == "default" else overload
        if not registered(name, overload):
            raise ValueError(lacks(f"{name}.{overload or 'default'}"))
        return torch._C._get_operation_overload(name, overload)[0]
    schemas = torch._C._jit_get_schemas_for_operator(name)
    if not any(registered(name, schema.overload_name) for schema in schemas):
        raise ValueError(lacks(name))  # TorchScript's own are none: one writes files
    return torch._C._jit_get_operation(name)[0]


def lacks(operator: str) -> str:
    """The message for a missing operator."""
    return f"no operator {operator!a} is registered; --import=MODULE imports the library that registers it"


def entries_of(path: str) -> list[dict[str, Any]]:
    """The entries of a file. Raises ValueError and OSError, with what is wrong."""
    with open(path, encoding="utf-8") as file:
        entries = json.load(file)
    if not isinstance(entries, list):
        raise ValueError("not EventReplay IR: expected a list of entries")
    for number, entry in enumerate(entries, 1):
        ir = entry.get("replay_ir") if isinstance(entry, dict) else None
        if (
            not isinstance(ir, dict)
            or not isinstance(entry.get("op_name"), str)
            or not all(isinstance(ir.get(key), list) for key in ("list_pos_args", "list_kwargs"))
        ):
            raise ValueError(f"entry {number}: expected op_name, and replay_ir with list_pos_args and list_kwargs")
    return entries


def arguments(entry: dict[str, Any], device: str | None, integers: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call; `integers` is the content of its integers by argument."""
    inputs = Inputs(device, integers)
    ir = entry["replay_ir"]

    def value(each: dict[str, Any]) -> Any:
        return inputs.value(each["arg_type"], each["value"], each.get("opreplay"), str(each.get("arg_name")))

    return [value(each) for each in ir["list_pos_args"]], {each["arg_name"]: value(each) for each in ir["list_kwargs"]}


def accelerator() -> str:
    """The kind of accelerator of this machine; "" if it has none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type


def synchronize() -> None:
    if accelerator():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)


def measure(call: Any, seconds: float) -> float:
    """Microseconds of one call: the median of as many as take `seconds`, at least five."""
    for _ in range(3):
        call()
    synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return f"Tensor(shape={tuple(value.shape)}, strides={strides}, dtype={value.dtype}, device={value.device})"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(each) for each in value) + "]"
    return repr(value)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


class Once(argparse.Action):
    """A value that may be given once: the first of two would be lost silently."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault("given", set())
        if self.dest in given and option_string:
            parser.error(f"{option_string} is given more than once; it takes one value")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def flags(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(Path(__file__).with_name("event_replay_ir.json")))
    parser.register("action", None, Once)
    parser.add_argument("--device", help="run everything there, such as cpu or cuda:1; default: where it was recorded")
    parser.add_argument("--op-filter", help="only operators whose name contains this")
    parser.add_argument("--op-limit", type=int, help="at most so many calls")
    parser.add_argument(
        "--benchmark-min-time",
        type=seconds,
        default=0.02,
        metavar="TIME",
        help="measure each call for so long (default 0.02s)",
    )
    parser.add_argument(
        "--allow-operator",
        action="append",
        default=[],
        metavar="NAME",
        help="run this operator although it does more than compute on tensors",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first: a library that registers operators. Repeatable",
    )
    parser.add_argument(
        "--op-library",
        action="append",
        default=[],
        metavar="NAMESPACE=MODULE",
        help="call this module's functions for calls of that namespace that are no operators. Repeatable",
    )
    parser.add_argument("--stop-on-error", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true", help="print arguments and results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = flags(given)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a foreign library may fail in any way
            print(f"--import={module}: {type(error).__name__}: {error}".split("\n")[0], file=sys.stderr)
            return 2
    try:
        if options.device is not None:
            torch.empty(0, device=options.device)
    except Exception as error:  # each kind of device says it in its own way
        print(f"--device={options.device}: {error}".split("\n")[0], file=sys.stderr)
        return 2
    try:
        entries = entries_of(options.file)
        integers = integers_beside(options.file)
    except (OSError, ValueError, RecursionError) as error:
        print(f"{options.file}: {error}".split("\n")[0], file=sys.stderr)
        return 2
    chosen = [
        (index, each)
        for index, each in enumerate(entries)
        if not options.op_filter or options.op_filter in each["op_name"]
    ]
    matched = len(chosen)
    if entries and not matched:
        print(f"--op-filter={options.op_filter}: no operator's name in {options.file} contains this", file=sys.stderr)
        return 2
    chosen = chosen[: options.op_limit]
    failed = 0
    total = 0.0
    number = 0
    for number, (index, entry) in enumerate(chosen, 1):
        name = entry["op_name"].encode("unicode_escape").decode()
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        try:
            function = operator(entry, options.allow_operator, options.op_library)
            positional, keywords = arguments(entry, options.device, integers.get(str(index), {}))
            if options.verbose:
                values = [*positional, *keywords.values()]
                described = entry["replay_ir"]["list_pos_args"] + entry["replay_ir"]["list_kwargs"]
                for argument, value in zip(described, values, strict=True):
                    print(f"  {argument['arg_name']} {argument['arg_type']}: {describe(value)}")
            with torch.no_grad():
                result = function(*positional, **keywords)
                elapsed = measure(lambda f=function, a=positional, k=keywords: f(*a, **k), options.benchmark_min_time)
        except Exception as error:
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}".split("\n")[0])
            if options.stop_on_error:
                break
            continue
        count = int(entry.get("count", 1))
        total += elapsed * count
        print(f"  {elapsed:.2f} us a call, {count} calls, {elapsed * count:.2f} us in the workload")
        if options.verbose:
            print(f"  Successfully executed {name}.")  # as TraceLens says it
            print(f"  result: {describe(result)}")
    print(
        f"{len(entries)} calls in the file, {matched} matched, {number} attempted, "
        f"{number - failed} successful, {failed} failed; {total:.2f} us in the workload"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
