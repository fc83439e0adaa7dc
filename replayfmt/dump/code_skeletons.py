"""Skeletons of replacements for kernels of code: a function with the kernel's parameters, whose body is to be written.

The captured source is below it as a comment, because it is code of the capture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from keyword import iskeyword
from os.path import basename
from typing import Any

from replayfmt.format.attachments import METADATA, SOURCE, contents_of, parse_metadata
from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import OperatorSchema
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.groups import SignatureIndex

from .skeleton_text import docstring_text, how_often, identifier_like, printable, signature_lines, type_hint

# Inductor puts what binds a kernel to Python behind it.
_BINDINGS = "// Python bindings to call kernel():"


def _texts(value: Any) -> list[str]:
    """The items of a list, or the keys of an object; none of anything else that a file may hold."""
    return list(map(str, value)) if isinstance(value, list | dict) else []


class _CodeSkeleton(ABC):
    """One file. Subclasses say what differs between languages."""

    variant = ""  # of --replay-kernel-substitution, behind the kernel's name

    def __init__(self, reader: CaptureReader, kernel_id: int, kernel: Kernel, schema: OperatorSchema) -> None:
        """Raises ValueError for a kernel that names no parameters."""
        self._reader, self._kernel_id, self._kernel, self._schema = reader, kernel_id, kernel, schema
        contents = contents_of(reader, kernel)
        self._names = self.named(parse_metadata(contents.get(METADATA, b"{}"), kernel.qualified_name))
        if not self._names or not all(each.isidentifier() and not iskeyword(each) for each in self._names):
            raise ValueError("its parameters have no names that a function can have")
        self._function = identifier_like(schema.base_name, {*self._names, "triton", "tl"})
        self._source = contents.get(SOURCE, b"").decode(errors="replace")

    @abstractmethod
    def named(self, metadata: dict[str, Any]) -> list[str]:
        """The names of the parameters."""

    @abstractmethod
    def head(self) -> list[str]:
        """The imports, and the function's first lines."""

    @abstractmethod
    def body(self) -> str:
        """A line that refuses to run."""

    def shown(self, source: str) -> str:
        """What of the captured source is shown."""
        return source

    def text(self) -> str:
        written = ", ".join(each.name for each in self._schema.arguments if each.type.written)
        lines = [
            *self._heading(),
            "",
            *self.head(),
            '    """' + docstring_text(self._kernel.schema),
            "",
            f"    It must write {written}, and no other argument."
            if written
            else "    It must not write its arguments.",
            '    """',
            f"    {self.body()}",
        ]
        if self._source:
            lines += ["", "", "# The source in the capture:", "#"]
            lines += [f"# {printable(line)}".rstrip() for line in self.shown(self._source).splitlines()]
        return "\n".join(lines) + "\n"

    def _heading(self) -> Iterator[str]:
        name = self._kernel.qualified_name
        chosen = f"{name}{self.variant}=THIS_FILE"
        chosen += "" if self._function == self._schema.base_name else f":{self._function}"
        groups = SignatureIndex(self._reader).groups({self._kernel_id})
        calls = how_often(sum(group.calls for group in groups))
        replaced = f"A replacement for {name}, kernel {self._kernel_id} of {basename(self._reader.path)}."
        yield '"""' + docstring_text(replaced)
        yield ""
        yield "It is checked against the original kernel at every captured call, then used:"
        yield ""
        yield f"    opreplay-run --allow-code --replay-kernel-substitution={chosen} CAPTURE"
        yield f"    opreplay-benchmark --compare --allow-code --replay-kernel-substitution={chosen} CAPTURE"
        yield ""
        yield f"The capture calls it {calls}, by signature (how often, the ordinal of the first, signature):"
        yield ""
        yield from signature_lines(groups)
        yield '"""'


class TritonSkeleton(_CodeSkeleton):
    """For a Triton kernel: a function of Triton."""

    variant = "@triton"

    def named(self, metadata: dict[str, Any]) -> list[str]:
        self._constexprs = frozenset(_texts(metadata.get("constexprs")))
        return _texts(metadata.get("parameters"))

    def head(self) -> list[str]:
        parameters = [f"{each}: tl.constexpr" if each in self._constexprs else each for each in self._names]
        imports = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
        return [*imports, f"def {self._function}({', '.join(parameters)}):"]

    def body(self) -> str:
        return 'tl.static_assert(False, "the kernel goes here")'


class CppSkeleton(_CodeSkeleton):
    """For a C++ kernel that Inductor generated: a Python function that writes the same arguments."""

    def named(self, metadata: dict[str, Any]) -> list[str]:
        return [argument.name for argument in self._schema.arguments]

    def head(self) -> list[str]:
        parameters = [f"    {argument.name}: {type_hint(argument.type)}," for argument in self._schema.arguments]
        imports = ["from __future__ import annotations", "", "import torch", "from torch import Tensor", "", ""]
        return [*imports, f"def {self._function}(", *parameters, ") -> None:"]

    def body(self) -> str:
        return 'raise NotImplementedError("the kernel goes here")'

    def shown(self, source: str) -> str:
        return source.partition(_BINDINGS)[0].strip()
