"""The skeleton of a replacement for a kernel of a capture: a Python file that runs, and does what the kernel does.

For an operator it calls the original. In Triton or C++, a kernel of its own then writes what the original computed,
until the user's computes it. For a kernel of code it is the captured source, with the user's permission. All else that
a capture says becomes part of the file only escaped.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from difflib import get_close_matches
from enum import IntEnum
from keyword import iskeyword
from os.path import basename
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.attachments import METADATA, SOURCE, contents_of, only_inside, parse_metadata
from replayfmt.format.codes import DType, KernelKind, Layout, MemoryFormat
from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import (
    OperatorSchema,
    SchemaArgument,
    SchemaType,
    name_problem,
    parse_operator_schema,
)
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import SignatureGroup, SignatureIndex

_SHOWN_SIGNATURES = 40
_LONGEST_LINE = 400
_HINTS = {
    "Tensor": "Tensor",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "SymFloat": "float",
    "bool": "bool",
    "SymBool": "bool",
    "str": "str",
    "complex": "complex",
    "Scalar": "bool | int | float | complex",
    "ScalarType": "torch.dtype",
    "Layout": "torch.layout",
    "Device": "torch.device",
    "Generator": "torch.Generator",
    "MemoryFormat": "torch.memory_format",
    "Storage": "torch.UntypedStorage",
}


def identifier_like(name: str, taken: set[str]) -> str:
    """An identifier like `name` that is not among `taken` and no word of Python's."""
    if not name.isidentifier():
        name = f"kernel_{name}"
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not an identifier")
    while name in taken or iskeyword(name) or name in ("torch", "Tensor"):
        name += "_"
    return name


def type_hint(declared: SchemaType) -> str:
    """A type hint for a schema's type, `object` where there is none that says more."""
    text = declared.text
    optional = text.endswith("?")
    text = text.removesuffix("?")
    if text.endswith("]"):
        inner = text[: text.rindex("[")]
        hint = f"list[{type_hint(SchemaType(inner))}]"
    else:
        hint = _HINTS.get(text, "object")
    return f"{hint} | None" if optional else hint


def docstring_text(text: str) -> str:
    """Text of a capture for a docstring: on one line, not too long, and nothing in it can end the docstring."""
    if len(text) > _LONGEST_LINE:
        text = text[: _LONGEST_LINE - 3] + "..."
    return printable(text.replace("\\", "\\\\").replace('"', '\\"'))


def printable(text: str) -> str:
    """Text of a capture for a comment: nothing in it ends the line."""
    return "".join(c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def signature_lines(groups: list[SignatureGroup]) -> Iterator[str]:
    """Lines for a docstring: how often, the ordinal of the first call, signature."""
    for group in sorted(groups, key=lambda group: (-group.calls, group.first))[:_SHOWN_SIGNATURES]:
        yield "    " + docstring_text(f"{group.calls} x  {group.first}  {group.text}")
    if len(groups) > _SHOWN_SIGNATURES:
        yield f"    and {len(groups) - _SHOWN_SIGNATURES} more signatures"


def how_often(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Inductor puts what binds a kernel to Python behind it.
BINDINGS = "// Python bindings to call kernel():"


def _texts(value: Any) -> list[str]:
    """The items of a list, or the keys of an object; none of anything else that a file may hold."""
    return list(map(str, value)) if isinstance(value, list | dict) else []


class _Skeleton(ABC):
    """One file while it is being written."""

    variant = ""  # of --replay-kernel-substitution, behind the kernel's name
    flags = ""  # that a replay needs besides

    def __init__(self, reader: CaptureReader, kernel_id: int, kernel: Kernel, schema: OperatorSchema) -> None:
        self._reader, self._kernel_id, self._kernel, self._schema = reader, kernel_id, kernel, schema
        taken = self.names_inside()
        self._function = self.function_name() or identifier_like(schema.base_name, taken)

    def function_name(self) -> str:
        """The function's name, "" for one like the kernel's."""
        return ""

    @abstractmethod
    def names_inside(self) -> set[str]:
        """The names that the function cannot have. Raises ValueError for a kernel that no function can stand for."""

    @abstractmethod
    def text(self) -> str:
        """The whole file."""

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
        yield f"    opreplay-run {self.flags}--replay-kernel-substitution={chosen} CAPTURE"
        yield f"    opreplay-benchmark --compare {self.flags}--replay-kernel-substitution={chosen} CAPTURE"
        yield ""
        yield from self.notes()
        if "MODULE" in self.flags:
            yield "MODULE registers the operator; this file may import it as well."
            yield ""
        yield f"The capture calls it {calls}, by signature (how often, the ordinal of the first, signature):"
        yield ""
        yield from signature_lines(groups)
        yield '"""'

    def notes(self) -> list[str]:
        """Paragraphs of the heading, each with an empty line behind it."""
        return []

    def _documented(self) -> Iterator[str]:
        """The beginning of the function's docstring."""
        written = ", ".join(argument.name for argument in self._schema.arguments if argument.type.written)
        yield '    """' + docstring_text(self._kernel.schema)
        yield ""
        if written:
            yield f"    It must write {written}, and no other argument."
        else:
            yield "    It must not write its arguments."


class _CodeSkeleton(_Skeleton):
    """For a kernel of code: its captured source. Subclasses say what differs between languages."""

    flags = "--allow-code "

    def names_inside(self) -> set[str]:
        contents = contents_of(self._reader, self._kernel)
        if SOURCE not in contents:
            raise ValueError("the capture has no source of it")
        self._source = contents[SOURCE].decode()
        self._metadata = parse_metadata(contents.get(METADATA, b"{}"), self._kernel.qualified_name)
        return {"torch", "kernel", "compiling"}

    @abstractmethod
    def code(self) -> Iterator[str]:
        """The file behind its docstring."""

    def text(self) -> str:
        *heading, end = self._heading()
        written = ", ".join(argument.name for argument in self._schema.arguments if argument.type.written)
        heading += ["", f"It must write {written}, and no other argument.", end]
        text = "\n".join([*heading, "", *self.code()]) + "\n"
        compile(text, "skeleton", "exec", dont_inherit=True)  # raises SyntaxError, and ValueError for zero bytes
        return text


class TritonSkeleton(_CodeSkeleton):
    """For a Triton kernel: the function of Triton, with those that it calls."""

    variant = "@triton"

    def names_inside(self) -> set[str]:
        names = super().names_inside()
        self._entry = self._metadata.get("function")
        if not isinstance(self._entry, str) or not self._entry.isidentifier():
            raise ValueError("its metadata does not name its function")
        return names

    def function_name(self) -> str:
        return str(self._entry)

    def code(self) -> Iterator[str]:
        yield f"# The captured source: your code goes into {self._entry}, which keeps its parameters."
        yield self._source.rstrip()


class CppSkeleton(_CodeSkeleton):
    """For a C++ kernel that Inductor generated: a Python function that calls it, built by Inductor as it was."""

    def code(self) -> Iterator[str]:
        names = [argument.name for argument in self._schema.arguments]
        parameters = self._metadata.get("parameters")
        if not isinstance(parameters, str) or not all(each.isidentifier() and not iskeyword(each) for each in names):
            raise ValueError("its parameters have no names that a function can have")
        types = [re.sub(r"\w+\s*\Z", "", each).strip() for each in parameters.split(",")]
        source = self._source.partition(BINDINGS)[0].strip()
        literal = f'r"""\n{source}\n"""'
        if '"""' in source:
            literal = f"r'''\n{source}\n'''"
        yield "from __future__ import annotations"
        yield ""
        yield "import torch"
        yield "from torch import Tensor"
        yield "from torch._inductor.async_compile import AsyncCompile"
        yield ""
        yield "# The captured source: your code goes into the function `kernel`, which keeps its parameters."
        yield f"SOURCE = {literal}"
        yield ""
        yield "compiling = AsyncCompile()"
        yield f"kernel = compiling.cpp_pybinding({types!a}, SOURCE)"
        yield "compiling.wait(globals())"
        yield ""
        yield ""
        yield f"def {self._function}("
        yield from (f"    {argument.name}: {type_hint(argument.type)}," for argument in self._schema.arguments)
        yield ") -> None:"
        yield f"    kernel({', '.join(names)})"


# Schemas hold the defaults of these types as PyTorch's numbers, which are one less than the format's codes.
_CODES: dict[str, type[IntEnum]] = {"MemoryFormat": MemoryFormat, "ScalarType": DType, "Layout": Layout}
_OF_CODE = {KernelKind.triton: TritonSkeleton, KernelKind.inductor_cpp: CppSkeleton}


def kernel_skeleton(
    reader: CaptureReader, which: int | str, language: str | None = None, allow_code: bool = False
) -> str:
    """The file's text. `which` is a kernel's id or the name of an operator, with or without its overload. `language`:
    of an operator's, one of LANGUAGES. `allow_code`: whether code of the capture may be in it.

    Raises UsageError if there is no such kernel, a name means several, or none can be written.
    """
    flag = f"--kernel-skeleton={which}"
    kernel_id = _kernel_id(reader, which, flag)
    kernel = reader.kernels[kernel_id]
    if kernel.kind not in (KernelKind.operator, *_OF_CODE):
        raise UsageError(
            f"{flag}: {kernel.qualified_name} is a {kernel.kind.name} kernel, of which no skeleton can be written"
        )
    try:
        schema = parse_operator_schema(kernel.schema)
        if kernel.kind in _OF_CODE:
            if language is not None:
                raise ValueError(f"it is code, whose language stays; leave out --language={language}")
            if not allow_code:
                raise ValueError(
                    "it is code: its skeleton is its source from the capture, which runs with the file; --allow-code "
                    "allows that"
                )
            return _OF_CODE[kernel.kind](reader, kernel_id, kernel, schema).text()
        problem = name_problem(kernel.name, kernel.overload)
        if problem:
            raise ValueError(problem)
        if (schema.name, schema.overload or "default") != (kernel.name, kernel.overload):
            raise ValueError(f"it is the schema of {schema.name}.{schema.overload or 'default'}")
        return _OF_OPERATORS[language or "python"](reader, kernel_id, kernel, schema).text()
    except (ValueError, SyntaxError) as error:
        raise UsageError(f"{flag}: no skeleton can be written of {kernel.qualified_name}: {error}") from None


def _kernel_id(reader: CaptureReader, which: int | str, flag: str) -> int:
    """The kernel that an id or a name means. Raises UsageError."""
    count = len(reader.kernels) - 1
    if isinstance(which, int) or re.fullmatch("-?[0-9]{1,18}", which):
        if not 1 <= int(which) <= count:
            raise UsageError(f"{flag}: {reader.path} has " + (f"the kernels 1 to {count}" if count else "no kernels"))
        return int(which)
    found = {
        kernel.qualified_name: number
        for number, kernel in enumerate(reader.kernels)
        if kernel is not None and which in (kernel.name, kernel.qualified_name)
    }
    if not found:
        close = get_close_matches(
            which,
            sorted(
                {
                    name
                    for kernel in reader.kernels
                    if kernel is not None
                    for name in (kernel.name, kernel.qualified_name)
                }
            ),
            3,
        )
        hint = f"did you mean {' or '.join(close)}?" if close else "opreplay-dump --signatures lists what it calls"
        inside = only_inside(reader, lambda name: name == which)
        raise UsageError(f"{flag}: {reader.path} calls no operator of that name; {inside or hint}")
    if len(found) > 1:
        raise UsageError(
            f"{flag}: {reader.path} calls {len(found)} overloads of it; name one of {', '.join(sorted(found))}"
        )
    return next(iter(found.values()))


class OperatorSkeleton(_Skeleton):
    """For an operator: a function that calls the original."""

    global_names: frozenset[str] = frozenset()  # that the file has besides

    def names_inside(self) -> set[str]:
        schema = self._schema
        names = {argument.name for argument in schema.arguments}
        taken = names | {schema.base_name, *self.global_names}
        self.flags = "" if self._kernel.qualified_name.startswith("aten::") else "--allow-import=MODULE "
        self._original = identifier_like("original", taken)
        # Arguments whose name is a Python keyword, which no parameter can have.
        self._words = [
            argument
            for argument in schema.arguments
            if iskeyword(argument.name) and (argument.keyword_only or argument.default is not None)
        ]
        self._others = identifier_like("words", {*taken, self._original, *(f"{name}_" for name in taken)})
        return names | self.global_names

    def text(self) -> str:
        lines = [
            *self._heading(),
            "",
            "from __future__ import annotations",
            "",
            *self.imports(),
            "",
            "",
            *self._called_original(),
            *self.kernel(),
            "",
            "",
            f"def {self._function}(",
            *self._parameters(),
            f") -> {self._returned_hint()}:",
            *self._docstring(),
            *self.body(f"{self._original}({', '.join(self._passed())})"),
        ]
        return "\n".join(lines) + "\n"

    def imports(self) -> list[str]:
        return ["import torch", "from torch import Tensor"]

    def kernel(self) -> list[str]:
        """A kernel, and what launches it."""
        return []

    def body(self, call: str) -> list[str]:
        """The function's last lines. `call`: of the original."""
        return [f"    return {call}"]

    def _called_original(self) -> Iterator[str]:
        """Looked up when it is called: a library that a replay is allowed to import may not be there when this file is
        loaded. `torch.ops` has attributes that are not operators: the dispatcher has to have one of this name."""
        overload = "" if self._kernel.overload == "default" else self._kernel.overload
        yield f"def {self._original}(*args: object, **kwargs: object) -> object:"
        yield '    """The kernel that is replaced."""'
        yield f'    torch._C._dispatch_find_schema_or_throw("{self._kernel.name}", "{overload}")'
        yield f"    return {self._operator()}(*args, **kwargs)"

    def _operator(self) -> str:
        namespace, _, base = self._kernel.name.partition("::")
        text = "torch.ops"
        for part in (namespace, base, self._kernel.overload):
            text = f'getattr({text}, "{part}")' if iskeyword(part) else f"{text}.{part}"
        return text

    def _parameters(self) -> Iterator[str]:
        keyword_only = False
        arguments = self._schema.arguments
        needed = [
            index for index, argument in enumerate(arguments) if argument.default is None and not argument.keyword_only
        ]
        for index, argument in enumerate(arguments):
            if argument.keyword_only and argument in self._words:
                continue
            if argument.keyword_only and not keyword_only:
                keyword_only = True
                yield "    *,"
            # Python has no parameter with a default before one without.
            default = None if needed and index < needed[-1] else argument.default
            hint = type_hint(argument.type)
            if default is None:
                yield f"    {self._parameter(argument)}: {hint},"
            else:
                value = _default(argument.type, default)
                none = " | None" if value == "None" and "None" not in hint else ""
                yield f"    {self._parameter(argument)}: {hint}{none} = {value},"
        if self._words:
            yield f"    **{self._others}: object,"

    def _parameter(self, argument: SchemaArgument) -> str:
        if not iskeyword(argument.name):
            return argument.name
        return identifier_like(argument.name, {other.name for other in self._schema.arguments})

    def _passed(self) -> list[str]:
        passed = []
        for argument in self._schema.arguments:
            if argument in self._words and argument.keyword_only:
                continue
            value = self._parameter(argument)
            if argument in self._words:
                value = f'{self._others}.pop("{argument.name}", {value})'
            passed.append(f"{argument.name}={value}" if argument.keyword_only else value)
        return [*passed, f"**{self._others}"] if self._words else passed

    def _returned_hint(self) -> str:
        returns = self._schema.returns
        if not returns:
            return "None"
        hints = [type_hint(each) for each in returns]
        return hints[0] if len(hints) == 1 else f"tuple[{', '.join(hints)}]"

    def _docstring(self) -> Iterator[str]:
        yield from self._documented()
        yield from self._results()
        yield '    """'

    def _results(self) -> Iterator[str]:
        by_alias = {argument.type.alias: argument.name for argument in self._schema.arguments if argument.type.alias}
        if not self._schema.returns:
            yield "    It returns nothing."
        for index, returned in enumerate(self._schema.returns):
            which = "It returns" if len(self._schema.returns) == 1 else f"Result {index} is"
            owner = by_alias.get(returned.alias) if returned.alias else None
            if owner is None:
                fresh = ", in memory of its own" if returned.holds_tensors else ""
                yield f"    {which} {docstring_text(returned.text)}{fresh}."
            elif returned.written:
                yield f"    {which} {owner} itself."
            else:
                yield f"    {which} {docstring_text(returned.text)} on the memory of {owner}, where the original's is."
        yield "    Sizes, strides and offsets of results must be the original's."


class _KernelSkeleton(OperatorSkeleton):
    """For an operator, with a kernel that is launched on all that the original has written."""

    launch = ""  # what has the kernel write `out`, from `computed`
    to_kernel = ""  # brings a tensor to where the kernel runs

    def body(self, call: str) -> list[str]:
        schema = self._schema
        names = {self._parameter(argument) for argument in schema.arguments}
        results = identifier_like("results", names | {self._original, self._others, *self.global_names})
        written = [self._parameter(argument) for argument in schema.arguments if argument.type.written]
        own = [each.holds_tensors and not each.alias for each in schema.returns]
        if own and all(own):
            written.append(results)
        else:
            written += [f"{results}[{index}]" for index, each in enumerate(own) if each]
        if not written:
            raise ValueError("it computes no tensor, so there is nothing for a kernel to write; leave out --language")
        if names & {"write"} or any(argument.type.written for argument in self._words):
            raise ValueError("its arguments have names that the file needs; leave out --language")
        return [
            "    # Your kernel's launch takes the place of these lines, and allocates what it returns.",
            f"    {results} = {call}",
            *(f"    write({each})" for each in written),
            f"    return {results}",
        ]

    def writer(self) -> list[str]:
        return f"""

def write(value: object) -> None:
    \"""Has the kernel write every tensor of a result or an argument.\"""
    if isinstance(value, (list, tuple)):
        for each in value:
            write(each)
    elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized and value.numel():
        computed = value.clone(memory_format=torch.contiguous_format){self.to_kernel}
        out = torch.empty_like(computed)
        {self.launch}
        value.copy_(out)""".splitlines()


class OperatorTritonSkeleton(_KernelSkeleton):
    """With a Triton kernel."""

    global_names = frozenset(("triton", "tl", "kernel", "write", "BLOCK"))
    launch = (
        "count = out.nbytes  # bytes, so that every dtype passes; yours takes tensors as they are\n"
        "        blocks = (triton.cdiv(count, BLOCK),)\n"
        "        kernel[blocks](out.view(-1).view(torch.uint8), computed.view(-1).view(torch.uint8), count, BLOCK)"
    )

    def notes(self) -> list[str]:
        return ["On the CPU, Triton's interpreter runs the kernel: put TRITON_INTERPRET=1 before these lines.", ""]

    def imports(self) -> list[str]:
        return ["import torch", "import triton", "import triton.language as tl", "from torch import Tensor"]

    def kernel(self) -> list[str]:
        text = """

BLOCK = 16384


@triton.jit
def kernel(out, computed, count, BLOCK: tl.constexpr):
    \"""Your code goes here: this copies what the original computed.\"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(computed + at, mask=at < count), mask=at < count)
"""
        return [*text.splitlines(), *self.writer()]


class OperatorCppSkeleton(_KernelSkeleton):
    """With a C++ kernel, which PyTorch builds when the file is loaded."""

    global_names = frozenset(("ctypes", "load_inline", "SOURCE", "library", "write"))
    launch = (
        "addresses = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(computed.data_ptr())\n"
        "        library.kernel(*addresses, ctypes.c_int64(out.nbytes))"
    )
    to_kernel = ".cpu()"

    def imports(self) -> list[str]:
        inline = "from torch.utils.cpp_extension import load_inline"
        return ["import ctypes", "", "import torch", "from torch import Tensor", inline]

    def kernel(self) -> list[str]:
        text = """

# Your code goes here: this copies what the original computed. It runs on the CPU; bytes, so that every dtype passes.
SOURCE = r\"""
#include <cstdint>

extern "C" void kernel(std::uint8_t* out, const std::uint8_t* computed, std::int64_t count) {
  for (std::int64_t at = 0; at < count; ++at) {
    out[at] = computed[at];
  }
}
\"""
""".splitlines()
        named = self._kernel.qualified_name.replace("::", "_").replace(".", "_")
        built = f'load_inline("{named}", SOURCE, is_python_module=False, no_implicit_headers=True)'
        return [*text, f"library = ctypes.CDLL({built})", "", *self.writer()]


_OF_OPERATORS = {"python": OperatorSkeleton, "triton": OperatorTritonSkeleton, "cpp": OperatorCppSkeleton}
LANGUAGES = tuple(_OF_OPERATORS)


def _default(declared: SchemaType, text: str) -> str:
    """A default as Python source: anything but a literal is refused, numbers that represent PyTorch's constants are
    named."""
    kind = declared.text.removesuffix("?")
    codes = _CODES.get(kind)
    if codes is not None and text.isdecimal():
        names = {code - 1: name for name, code in codes.__members__.items()}
        if int(text) not in names:
            raise ValueError(f"its default {text} is not a known {kind}")
        return f"torch.{names[int(text)]}"
    if codes is not None and text in codes.__members__:
        return f"torch.{text}"
    if kind == "Device" and text not in ("None",):
        text = repr(text.strip("\"'"))
    if text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    try:
        value = ast.literal_eval(text)
        written = repr(value)
        ast.literal_eval(written)  # `...` and 1e999 are written as names
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"its default {text[:80]!r} is not a literal") from None
    if not written.isascii() or not written.isprintable():
        written = ascii(value)
    if kind.endswith("]") and isinstance(value, int | float) and not isinstance(value, bool):
        length = kind[kind.rindex("[") + 1 : -1]
        written = repr([value] * int(length)) if length.isdecimal() and int(length) < 16 else repr([value])
    return written
