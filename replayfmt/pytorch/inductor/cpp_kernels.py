"""Inductor's generated C++ kernels: one function named `kernel` each, whose signature says what it reads and writes.

Recording turns such a signature into a schema, replay checks a call against it. Neither needs Inductor for that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

NAMESPACE = "inductor_cpp"
ENTRY = "kernel"
_SIGNATURE = re.compile(rf'extern\s+"C"[^(){{}};]*?\bvoid\s+{ENTRY}\s*\(([^(){{}};]*)\)')
_PARAMETER = re.compile(
    r"(?P<const>const\s+)?(?P<type>[A-Za-z_][\w:]*(?:<[\w:]+>)?)(?:\s*(?P<star>\*)\s*|\s+)(?P<name>\w+)\Z"
)
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "at::Half": torch.float16,
    "at::BFloat16": torch.bfloat16,
    "int64_t": torch.int64,
    "int32_t": torch.int32,
    "int16_t": torch.int16,
    "int8_t": torch.int8,
    "uint64_t": torch.uint64,
    "uint32_t": torch.uint32,
    "uint16_t": torch.uint16,
    "uint8_t": torch.uint8,
    "bool": torch.bool,
    "at::complex<at::Half>": torch.complex32,
    "at::complex<float>": torch.complex64,
    "at::complex<double>": torch.complex128,
    "at::Float8_e4m3fn": torch.float8_e4m3fn,
    "at::Float8_e5m2": torch.float8_e5m2,
    "at::Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "at::Float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
_SCALARS = {"int64_t": "int", "float": "float"}  # the numbers that Inductor's Python binding takes


@dataclass(frozen=True)
class CppArgument:
    """One parameter. `dtype`: the elements that a pointer points to, None for a number. `written`: its memory may be
    written."""

    name: str
    type: str
    dtype: torch.dtype | None
    written: bool

    @property
    def passed_as(self) -> str:
        """Its type in C++, without qualifiers."""
        return self.type if self.dtype is None else f"{self.type}*"

    @property
    def read(self) -> bool | None:
        """Whether the kernel reads it; None if it does unless it wrote it before. What Inductor names `out_ptr` is
        read only after it was written, or where the same memory is given for another argument, too; what it names
        `in_out_ptr` may be memory that it has just allocated."""
        return True if not self.written else False if self.name.startswith("out_ptr") else None


def parameters_of(source: str) -> str:
    """The text of the kernel's parameters in a C++ source. Raises ValueError if there is not one kernel."""
    found = _SIGNATURE.findall(source)
    if len(found) != 1:
        raise ValueError(f'{len(found)} functions `extern "C" void {ENTRY}(…)`, expected one')
    return " ".join(found[0].split())


def parse_parameters(text: str) -> tuple[CppArgument, ...]:
    """The parameters of a kernel. Raises ValueError with the reason if they cannot be told."""
    arguments = tuple(_argument(each.strip()) for each in text.split(",")) if text.strip() else ()
    if len({argument.name for argument in arguments}) != len(arguments):
        raise ValueError("two parameters of one name")
    return arguments


def _argument(text: str) -> CppArgument:
    match = _PARAMETER.match(text)
    if match is None:
        raise ValueError(f"the parameter {text!r} is neither a number nor a pointer to elements")
    kind = match["type"]
    if match["star"]:
        if kind not in _DTYPES:
            raise ValueError(f"the parameter {text!r} points to no elements of a tensor")
        return CppArgument(match["name"], kind, _DTYPES[kind], match["const"] is None)
    if kind not in _SCALARS:
        raise ValueError(f"the parameter {text!r} is a number that Inductor passes to no kernel")
    return CppArgument(match["name"], kind, None, False)


def variant_of(*parts: str | bytes) -> str:
    """The name of one code object among those of a kernel's name: from what it is compiled from, and how."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return f"v{digest.hexdigest()[:16]}"


def schema_of(name: str, variant: str, arguments: Sequence[CppArgument]) -> str:
    """The schema of a kernel, in the dispatcher's grammar."""
    written = 0
    texts = []
    for argument in arguments:
        if argument.dtype is None:
            texts.append(f"{_SCALARS[argument.type]} {argument.name}")
        elif argument.written:
            texts.append(f"Tensor(a{written}!) {argument.name}")
            written += 1
        else:
            texts.append(f"Tensor {argument.name}")
    return f"{NAMESPACE}::{name}.{variant}({', '.join(texts)}) -> ()"


@dataclass(frozen=True)
class StoredCppKernel:
    """What a capture stores of a kernel, in attachments by role.

    `parameters`: the text of its parameters. `source`: all that was compiled, with the Python binding that Inductor
    gives it; None if it was left out. `library`: what it was compiled to, None likewise. `flags`: the compiler's words
    without paths; empty if it is not known how the library was compiled. `compiled_for`: what the library fits
    (code_machine.py).
    """

    parameters: str
    source: str | None
    library: bytes | None
    flags: tuple[str, ...]
    compiled_for: Mapping[str, str]

    @property
    def arguments(self) -> tuple[CppArgument, ...]:
        """Raises ValueError."""
        return parse_parameters(self.parameters)

    def variant(self) -> str:
        """The name that tells this code object from others. The source must be there."""
        assert self.source is not None
        return variant_of(self.source, *self.flags, self.compiled_for["torch"])

    def contents(self) -> dict[str, bytes]:
        """The attachments' bytes, by role."""
        assert self.source is not None and self.library is not None
        metadata = {
            "parameters": self.parameters,
            "writes": "signature",  # how it is known what the kernel writes
            "flags": list(self.flags),
            "compiled_for": dict(self.compiled_for),
            "object_sha256": hashlib.sha256(self.library).hexdigest(),
        }
        text = json.dumps(metadata, indent=1, sort_keys=True)
        return {"source": self.source.encode(), "object": self.library, "metadata": text.encode()}

    @staticmethod
    def read(contents: Mapping[str, bytes]) -> StoredCppKernel:
        """The reverse. Raises ValueError if this is no stored kernel, or its library is another than it says."""
        try:
            metadata = json.loads(contents["metadata"])
            parameters, flags, target = metadata["parameters"], metadata["flags"], metadata["compiled_for"]
            source = contents["source"].decode() if "source" in contents else None
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"what is stored of it cannot be read ({type(error).__name__}: {error})") from None
        texts = (
            [parameters, *flags, *target.values()] if isinstance(flags, list) and isinstance(target, dict) else [None]
        )
        if not all(isinstance(text, str) for text in texts) or "torch" not in target:
            raise ValueError("what is stored of it cannot be read (its metadata has other types than expected)")
        library = contents.get("object")
        if library is not None and hashlib.sha256(library).hexdigest() != metadata.get("object_sha256"):
            raise ValueError("its stored library does not match the digest that is stored with it")
        if source is not None and parameters_of(source) != parameters:
            raise ValueError("its stored source has other parameters than stored with it")
        return StoredCppKernel(parameters, source, library, tuple(flags), target)
