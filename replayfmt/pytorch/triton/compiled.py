"""What Triton compiled of a kernel: kept with it, recognized again, and launched without its compiler.

A binary is launched only for the target and the version of Triton that it was compiled for, and for arguments with the
specialization that it was compiled with: types, constants, divisibility.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .ir_writes import IrAccesses, NotRead, ir_accesses

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
    """A target as JSON."""
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
        """The name of the function in it."""
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
