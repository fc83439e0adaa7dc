"""What Triton compiled of a kernel: kept with it, recognized again, and launched without its compiler.

A binary of the user's own may take the place of the one that Triton compiled for a captured launch. It is launched as
the captured one is: by Triton's launcher, with the parameters of the captured binary, for arguments of the captured
specialization. `Cubin` reads what a cubin says of the kernels in it. What it does not say is in a sidecar: a JSON
object with `shared`, the bytes of dynamic shared memory, and where they differ from the captured kernel `name`,
`num_warps` and others. What Triton's cache has beside each cubin is one. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from .accesses import IrAccesses, NotRead, ir_accesses

# The stages of compilation that are kept. The last two are binaries.
STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin", "hsaco")
BINARIES = ("cubin", "hsaco")
_TARGET = ("backend", "arch", "warp_size")
_DESCRIPTOR = re.compile(r"tensordesc<[^\[]*\[([^\]]*)\]")
# Of Triton's metadata: where things are on the machine that compiled.
_LOCAL = ("extern_libs",)


def attached_stages(kernel: Any) -> list[tuple[str, bytes]]:
    """What a compiled kernel holds, by role."""
    found = []
    for role in STAGES:
        content = kernel.asm.get(role) if role in kernel.asm.keys() else None  # noqa: SIM118 - no plain dict
        if content is not None:
            found.append((role, content if isinstance(content, bytes) else str(content).encode()))
    return found


def compiled_metadata(kernel: Any, name_of: Callable[[Any], str | None]) -> dict[str, Any]:
    """What has to be known of a compiled kernel to launch its binary, as JSON. `name_of` gives the names of functions
    in the kernel's own module, which may differ from those in the program."""
    described = {name: value for name, value in kernel.metadata._asdict().items() if name not in _LOCAL}
    described["target"] = target_of(kernel.metadata.target)
    source = kernel.src
    return {
        "target": described["target"],
        "compiled": json.loads(json.dumps(described, default=str)),
        "specialization": specialization(source.signature, source.constants, source.attrs, name_of),
        "sha256": {role: hashlib.sha256(content).hexdigest() for role, content in attached_stages(kernel)},
    }


def target_of(target: Any) -> dict[str, Any]:
    return {name: getattr(target, name) for name in _TARGET}


def specialization(
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attrs: Mapping[Any, Any],
    name_of: Callable[[Any], str | None] = lambda _function: None,
) -> Any:
    """For which arguments code is compiled, as JSON: their types, constants, and what is known of the others."""
    found = {
        "signature": signature,
        "constants": [[path, _constant(constants[path], name_of)] for path in sorted(constants)],
        "attributes": [[path, attrs[path]] for path in sorted(attrs) if attrs[path]],
    }
    return json.loads(json.dumps(found, default=str))


def _constant(value: Any, name_of: Callable[[Any], str | None]) -> str:
    if hasattr(value, "fn") and hasattr(value, "cache_key"):
        return f"function {name_of(value) or value.__name__}"
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    return repr(value)


class CompiledAccesses(NamedTuple):
    """The parameters that a compiled kernel may write (`stored`: see `IrAccesses`) and read, and whether it makes
    pointers of integers."""

    written: frozenset[str]
    stored: frozenset[str]
    read: frozenset[str]
    makes_pointers: bool


def compiled_accesses(kernel: Any) -> CompiledAccesses | None:
    """What a compiled kernel does with its parameters; None if its intermediate code does not tell."""
    try:
        found: IrAccesses = ir_accesses(str(kernel.asm["ttir"]))
    except (KeyError, NotRead):
        return None
    places = argument_places(kernel.src.signature)
    if len(places) != found.count:
        return None

    def named(arguments: frozenset[int]) -> frozenset[str]:
        return frozenset(places[argument] for argument in arguments)

    return CompiledAccesses(named(found.written), named(found.stored), named(found.read), found.makes_pointers)


def argument_places(signature: Mapping[str, Any]) -> list[str]:
    """The parameter that each argument of the compiled function belongs to."""
    found = []
    for name, kind in signature.items():
        for leaf in _leaves(kind):
            descriptor = _DESCRIPTOR.match(leaf)
            # A descriptor brings the sizes and strides of its tensor.
            rank = len(descriptor[1].split(",")) if descriptor else 0
            found += [name] * (1 + 2 * rank)
    return found


def _leaves(kind: Any) -> Iterator[str]:
    if isinstance(kind, tuple | list):
        for each in kind:
            yield from _leaves(each)
    elif kind != "constexpr":
        yield str(kind)


class StoredBinary:
    """The binary of a capture, in place of what Triton's compiler would make. `metadata`: those that Triton keeps with
    it. `specialization`: see the function of this name."""

    def __init__(self, metadata: Mapping[str, Any], stages: Mapping[str, bytes]) -> None:
        """`metadata`: what `compiled_metadata` gave. Raises ValueError if they are not, or do not match `stages`."""
        kinds = {"target": dict, "compiled": dict, "specialization": dict, "sha256": dict}
        for key, kind in kinds.items():
            if not isinstance(metadata.get(key), kind):
                raise ValueError(f"its metadata have no {key}")
        self.target, self.metadata = metadata["target"], metadata["compiled"]
        self.specialization = metadata["specialization"]
        for role, digest in metadata["sha256"].items():
            if role in stages and hashlib.sha256(stages[role]).hexdigest() != digest:
                raise ValueError(f"its {role} does not match the hash in its metadata")
        unknown = [role for role in stages if role not in metadata["sha256"]]
        if unknown:
            raise ValueError(f"its metadata have no hash of its {', '.join(unknown)}")
        self.stages = dict(stages)
        self.triton = str(self.metadata.get("triton_version"))
        if not any(role in stages for role in BINARIES):
            raise ValueError("it has no binary")
        if not isinstance(self.metadata.get("name"), str) or not self.metadata["name"].isidentifier():
            raise ValueError("its metadata have no name of a function")

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    def mismatch(self, target: Any, version: str) -> str:
        """Why it cannot be launched on a target by a version of Triton, or ""."""
        here = target_of(target)
        if here != self.target:
            return f"it was compiled for {_named(self.target)}, this is {_named(here)}"
        if version != self.triton:
            return f"it was compiled by Triton {self.triton}, this is {version}"
        return ""

    def difference(self, signature: Any, constants: Any, attrs: Any, options: Mapping[str, Any]) -> str:
        """How arguments and options differ from those that it was compiled for, or ""."""
        given = specialization(signature, constants, attrs)
        chosen = {name: value for name, value in options.items() if name in self.metadata and name not in _LOCAL}
        given |= json.loads(json.dumps(chosen, default=str))
        compiled = {**self.metadata, **self.specialization}
        parts = [key for key in given if given[key] != compiled.get(key)]
        return "; ".join(f"{part}: compiled for {compiled.get(part)}, given {given[part]}" for part in parts)

    def kernel(self, source: Any) -> Any:
        """Triton's object for it. `source`: what it was compiled from."""
        from triton.compiler import CompiledKernel

        name = self.name
        with tempfile.TemporaryDirectory(prefix="opreplay-") as folder:
            files = {f"{name}.json": json.dumps(self.metadata).encode()}
            files |= {f"{name}.{role}": content for role, content in self.stages.items()}
            for file, content in files.items():
                with open(os.path.join(folder, file), "wb") as opened:
                    opened.write(content)
            # It reads them at once.
            return CompiledKernel(source, {file: os.path.join(folder, file) for file in files}, str(self.metadata))


def _named(target: Mapping[str, Any]) -> str:
    return f"{target.get('backend')}:{target.get('arch')}"


_MAGIC, _MACHINE = b"\x7fELF\x02\x01", 190  # 64 bits, little endian; NVIDIA CUDA
_ABI_OF_CUDA_13 = 0x41
_INFO = ".nv.info."
_PARAMETER, _MOST_THREADS, _EXACT_THREADS = 0x17, 0x05, 0x10
_SIZED = 4  # the form of attributes that have a content of their own


@dataclass(frozen=True)
class CubinKernel:
    """One kernel. `parameter_bytes`: the size of each parameter. `exact_threads`: how many threads a block must have,
    `most_threads`: may have, None if the cubin does not say."""

    name: str
    parameter_bytes: tuple[int, ...]
    exact_threads: int | None
    most_threads: int | None


@dataclass(frozen=True)
class Cubin:
    """`arch`: the compute capability that it is for, as 80 for 8.0. `only_there`: it runs on no later one."""

    arch: int
    only_there: bool
    kernels: Mapping[str, CubinKernel]

    @classmethod
    def read(cls, content: bytes) -> Cubin:
        """Raises ValueError for what is no cubin."""
        try:
            return cls._read(content)
        except (struct.error, IndexError, UnicodeDecodeError):
            raise ValueError("it is not a cubin: what its headers say is not in it") from None

    @classmethod
    def _read(cls, content: bytes) -> Cubin:
        if content[:6] != _MAGIC or struct.unpack_from("<H", content, 18)[0] != _MACHINE:
            raise ValueError("it is not a cubin: not an ELF file for NVIDIA devices")
        (flags,) = struct.unpack_from("<I", content, 48)
        if content[7] >= _ABI_OF_CUDA_13:
            arch, only_there = flags >> 8 & 0xFF, bool(flags & 0x8)
        else:
            arch, only_there = flags & 0xFF, bool(flags & 0x800)
        found = {}
        for name, section in _sections(content):
            if name.startswith(_INFO):
                kernel = _kernel(name.removeprefix(_INFO), section)
                found[kernel.name] = kernel
        return cls(arch, only_there, found)

    def mismatch(self, arch: int) -> str:
        """Why it cannot run on devices of a compute capability, or ""."""
        fits = arch == self.arch if self.only_there else arch // 10 == self.arch // 10 and arch >= self.arch
        return "" if fits else f"it is for sm_{self.arch}, this device is sm_{arch}"


def _sections(content: bytes) -> Iterator[tuple[str, bytes]]:
    (first,) = struct.unpack_from("<Q", content, 40)
    size, count, of_names = struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, first + size * place) for place in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, start, length in headers:
        if start + length > len(content) and kind != 8:  # of a kind that is not in the file
            raise IndexError
        end = content.find(b"\0", names + name)
        yield content[names + name : end].decode(), content[start : start + length]


def _kernel(name: str, section: bytes) -> CubinKernel:
    parameters: dict[int, int] = {}
    threads: dict[int, int] = {}
    place = 0
    while place < len(section):
        form, code, length = struct.unpack_from("<BBH", section, place)
        place += 4
        if form != _SIZED:
            continue
        value = section[place : place + length]
        place += length
        if code == _PARAMETER:
            _, ordinal, _, packed = struct.unpack("<IHHI", value)
            parameters[ordinal] = packed >> 18
        elif code in (_MOST_THREADS, _EXACT_THREADS):
            threads[code] = prod(struct.unpack("<III", value))
    if sorted(parameters) != list(range(len(parameters))):
        raise IndexError
    sizes = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return CubinKernel(name, sizes, threads.get(_EXACT_THREADS), threads.get(_MOST_THREADS))


_SHARED = "shared"
_COUNTS = (
    _SHARED,
    "num_warps",
    "num_ctas",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
    "tmem_size",
)
_FLAGS = ("launch_cooperative_grid", "launch_pdl")
_TAKEN = ("name", *_COUNTS, *_FLAGS)
_OF_TRITON = "triton_version"  # in the sidecars that Triton writes, with more than is taken


@dataclass(frozen=True)
class GivenCubin:
    """A cubin as the user gave it. `entry`: the kernel in it, "" if the user named none. `sidecar`: what it says, None
    if there is none."""

    content: bytes
    entry: str
    sidecar_path: str
    sidecar: Any


class GivenBinary(StoredBinary):
    """A binary that takes the place of a stored one, whatever options that was compiled with."""

    def difference(self, signature: Any, constants: Any, attrs: Any, options: Mapping[str, Any]) -> str:
        return super().difference(signature, constants, attrs, {})


def given_binary(
    stored: StoredBinary, given: GivenCubin, target: Any, version: str, most_shared_bytes: int
) -> GivenBinary:
    """The cubin for launches of the kernel that `stored` is the binary of, on a target where a block has at most so
    much shared memory, by a version of Triton. Raises ValueError that says why it cannot take its place."""
    if target.backend != "cuda":
        raise ValueError(f"it is a cubin, and Triton launches for {target.backend} here")
    if version != stored.triton:
        raise ValueError(f"it would be launched as Triton {stored.triton} did, and this is Triton {version}")
    cubin = Cubin.read(given.content)
    said = _said(given)
    kernel = _entry(cubin, str(given.entry or said.get("name", "")), stored.name)
    problem = cubin.mismatch(target.arch)
    if problem:
        raise ValueError(problem)
    _check_parameters(kernel, stored)
    if said[_SHARED] > most_shared_bytes:
        raise ValueError(f"it needs {said[_SHARED]:,} bytes of shared memory, this device has {most_shared_bytes:,}")
    warps = said.setdefault("num_warps", _warps(kernel, target.warp_size) or stored.metadata["num_warps"])
    threads = warps * target.warp_size
    for limit, fits, text in (
        (kernel.exact_threads, threads == kernel.exact_threads, "with blocks of exactly"),
        (kernel.most_threads, threads <= (kernel.most_threads or threads), "with blocks of at most"),
    ):
        if limit is not None and not fits:
            raise ValueError(
                f"its {kernel.name} is to be launched {text} {limit} threads, and num_warps={warps} makes {threads}"
            )
    compiled = {**stored.metadata, **said, "name": kernel.name, "target": target_of(target)}
    metadata = {
        "target": target_of(target),
        "compiled": compiled,
        "specialization": stored.specialization,
        "sha256": {"cubin": hashlib.sha256(given.content).hexdigest()},
    }
    return GivenBinary(metadata, {"cubin": given.content})


def _said(given: GivenCubin) -> dict[str, Any]:
    """What the sidecar says, as far as it is taken."""
    where = given.sidecar_path
    if given.sidecar is None:
        raise ValueError(
            "a cubin does not say how much dynamic shared memory its kernel needs: write "
            f'{{"{_SHARED}": BYTES}} to {where}, where Triton writes it, too'
        )
    if not isinstance(given.sidecar, dict) or _SHARED not in given.sidecar:
        raise ValueError(f"{where} is not a JSON object with {_SHARED!r}")
    said = {key: value for key, value in given.sidecar.items() if key in _TAKEN}
    unknown = sorted(set(given.sidecar) - set(said))
    if unknown and _OF_TRITON not in given.sidecar:
        raise ValueError(f"{where} has {', '.join(map(ascii, unknown))}; expected some of {', '.join(_TAKEN)}")
    for key, value in said.items():
        least = 1 if key in ("num_warps", "num_ctas") else 0
        if key in _COUNTS and not (type(value) is int and value >= least):
            raise ValueError(f"{where}: {key} is {value!a}; expected {least} or more")
        if key not in _COUNTS and type(value) is not (bool if key in _FLAGS else str):
            raise ValueError(f"{where}: {key} is {value!a}; expected {'true or false' if key in _FLAGS else 'a name'}")
    return said


def _entry(cubin: Cubin, name: str, captured: str) -> CubinKernel:
    """The kernel of this name; without a name, the only one, or the one that is called as the captured one is."""
    there = ", ".join(sorted(cubin.kernels)) or "none"
    if not name:
        name = next(iter(cubin.kernels)) if len(cubin.kernels) == 1 else captured
    if name not in cubin.kernels:
        raise ValueError(f"it has no kernel {name}; its kernels are {there} (FILE:NAME names one)")
    return cubin.kernels[name]


def _check_parameters(kernel: CubinKernel, stored: StoredBinary) -> None:
    """Triton passes the arguments, and then the addresses of memory of its own, which a kernel need not take."""
    captured = Cubin.read(stored.stages["cubin"]).kernels.get(stored.name) if "cubin" in stored.stages else None
    if captured is None:
        raise ValueError("the capture has no cubin of the kernel, whose parameters it would have to take")
    names = argument_places(stored.specialization["signature"])
    expected, found = captured.parameter_bytes, kernel.parameter_bytes
    if found != expected[: max(len(found), len(names))]:
        there = ", ".join(f"{name} ({size})" for name, size in zip(names, expected, strict=False))
        raise ValueError(
            f"its {kernel.name} takes {len(found)} parameters, of {', '.join(map(str, found)) or 'no'} bytes; expected "
            f"{len(names)} and up to {len(expected) - len(names)} addresses of Triton's: {there or 'none'}"
        )


def _warps(kernel: CubinKernel, warp_size: int) -> int | None:
    exact = kernel.exact_threads
    return exact // warp_size if exact is not None and exact % warp_size == 0 else None
