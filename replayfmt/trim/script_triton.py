"""Values of a capture as Python expressions, and kernels of code in a script: their sources as sections, their calls.

Anything from the file becomes a literal or a checked name, never code.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import math
import re
import symtable
from collections.abc import Callable, Collection, Mapping
from keyword import iskeyword
from typing import Any

from replayfmt.dump.kernel_skeleton import BINDINGS
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import DType, KernelKind, Layout, MemoryFormat
from replayfmt.format.model import Device, Kernel
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.cpp_kernels import StoredCppKernel
from replayfmt.pytorch.operators import WITH_TORCH_ALONE
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT
from replayfmt.pytorch.triton.kernels import INTERPRETER, StoredKernel
from replayfmt.pytorch.triton.sources import edited

# The statements that set settings. Other settings matter only if they differ from a new process's.
SETTERS = {
    "num_threads": "torch.set_num_threads({})",
    "default_dtype": "torch.set_default_dtype(torch.{})",
    "grad_enabled": "torch.set_grad_enabled({})",
    "deterministic_debug_mode": "torch.set_deterministic_debug_mode({})",
    "fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory = {}",
    "flush_denormal": "torch.set_flush_denormal({})",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({})",
    "cudnn_allow_tf32": "torch.backends.cudnn.allow_tf32 = {}",
    "cudnn_enabled": "torch.backends.cudnn.enabled = {}",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = {}",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic = {}",
    "mkldnn_enabled": "torch._C._set_mkldnn_enabled({})",
    "mkldnn_deterministic": "torch._C._set_mkldnn_deterministic({})",
    "nnpack_enabled": "torch._C._set_nnpack_enabled({})",
    "sdp_flash": "torch.backends.cuda.enable_flash_sdp({})",
    "sdp_mem_efficient": "torch.backends.cuda.enable_mem_efficient_sdp({})",
    "sdp_math": "torch.backends.cuda.enable_math_sdp({})",
    "sdp_cudnn": "torch.backends.cuda.enable_cudnn_sdp({})",
}
ALWAYS_STATED = ("num_threads", "default_dtype", "grad_enabled")


def setting(name: str, value: object) -> str:
    """The statement that sets a setting. Raises ReplayRefused for one that a script cannot set."""
    if name.startswith("fp32_precision."):
        backend, _, operation = name.removeprefix("fp32_precision.").partition(".")
        return f"torch._C._set_fp32_precision_setter({backend!a}, {operation!a}, {str(value)!a})"
    template = SETTERS.get(name)
    if template is None or not isinstance(value, bool | int | float | str):
        raise ReplayRefused(f"the setting {name} = {value!r} cannot be made by a script")
    if name == "default_dtype":
        return template.format(identifier(str(value)))
    return template.format(scalar(value))


def identifier(name: str) -> str:
    """A valid Python identifier. Raises ReplayRefused for any other name."""
    if not (name.isascii() and name.isidentifier()) or iskeyword(name):
        raise ReplayRefused(f"{name!r} is not a name that a script could use")
    return name


def operator(kernel: Kernel) -> str:
    """How a script calls an operator. Raises ReplayRefused for one that torch alone does not have."""
    namespace, _, base = kernel.name.partition("::")
    if namespace not in WITH_TORCH_ALONE:
        raise ReplayRefused(f"{kernel.qualified_name} is not an operator of torch's own; a script needs only torch")
    if iskeyword(kernel.overload):
        return f"getattr(torch.ops.{namespace}.{identifier(base)}, {kernel.overload!a})"
    return f"torch.ops.{namespace}.{identifier(base)}.{identifier(kernel.overload)}"


def argument(name: str, value: str) -> str:
    """One argument of a call by name; in a dictionary if the name is a Python keyword."""
    if name.isascii() and name.isidentifier() and iskeyword(name):
        return f"**{{{name!a}: {value}}}"
    return f"{identifier(name)}={value}"


def scalar(value: bool | int | float | complex | str | None) -> str:
    if isinstance(value, complex):
        if cmath.isfinite(value):
            return f"complex({value.real!r}, {value.imag!r})"
        return f"complex({scalar(value.real)}, {scalar(value.imag)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value!r}")'
    return ascii(value)


def dtype(code: DType) -> str:
    """`torch.float32`. Raises ReplayRefused for one that this torch does not have."""
    if code not in TORCH_DTYPE:
        raise ReplayRefused(f"this torch has no dtype {code.name}")
    return str(TORCH_DTYPE[code])


def enumeration(value: DType | Layout | MemoryFormat) -> str:
    if isinstance(value, DType):
        return dtype(value)
    return str(TORCH_LAYOUT[value] if isinstance(value, Layout) else TORCH_MEMORY_FORMAT[value])


def device(given: Device) -> str:
    """`"cuda:0"`, as a literal."""
    return ascii(f"{identifier(given.kind)}" + ("" if given.index < 0 else f":{given.index}"))


def comment(text: str) -> str:
    """Text that cannot end its comment: one line of printable characters."""
    return "".join(each if each.isprintable() and each.isascii() else ascii(each)[1:-1] for each in text)


_OF_RUN = re.compile(r"(?:[tgs]\d+|value_\d+_\d+|_+)\Z")  # variables of the script's `run`
_NAMES = re.compile(r"[A-Za-z_]\w*")
_OF_LAUNCHES = {"self", "grid", "warmup"}  # parameters of Triton's own, which a kernel's cannot be named with
_SWITCH = """\
# These kernels were captured from Triton's interpreter, which may compute other bits than its compiler. Triton chooses
# when it is imported, and decorates functions accordingly: this has to stand before anything that may import it."""
_MEMORY = (
    "# Where Triton makes tensor descriptors.",
    "triton.set_allocator(",
    "    lambda length, alignment, stream: torch.empty(",
    "        length, dtype=torch.uint8, device=torch.accelerator.current_accelerator()",
    "    )",
    ")",
)
_DESCRIPTOR_OPTIONS = ("padding", "round_f32_to_tf32")


class _Section:
    """A source as it is in the script. `names`: of what it defines, there."""

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        self.text, self._names = text, names
        self.functions = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}

    def function(self, name: str) -> str:
        """The name in the script of a function of the source. Raises ValueError if there is none."""
        there = self._names.get(name, name)
        if there not in self.functions:
            raise ValueError(f"its source has no function {name!a}")
        return there


class CodeSections:
    """The Triton kernels of one script, and the C++ in it that Inductor generated. `allowed`: whether code of the
    capture may be in it; `frame`: all other text of the script, whose names are not free."""

    def __init__(self, reader: CaptureReader, allowed: bool, frame: str) -> None:
        self._reader, self._allowed = reader, allowed
        self._meanings: dict[str, str | None] = dict.fromkeys([*dir(builtins), *_NAMES.findall(frame)])
        self._meanings |= dict.fromkeys(("os", "namedtuple", "TensorDescriptor", "AsyncCompile", "compiling"))
        self._meanings |= {"triton": "import triton", "tl": "import triton.language as tl"}
        self._calls: list[str] = []
        self._sections: dict[str, _Section] = {}
        self._kernels: dict[str, StoredKernel] = {}
        self._cpp: dict[str, str] = {}  # what builds a kernel → its name

    @property
    def interpreted(self) -> bool:
        return any(each.target == INTERPRETER for each in self._kernels.values())

    @property
    def needs(self) -> str:
        return "torch" + " and triton" * bool(self._kernels) + " and a C++ compiler" * bool(self._cpp)

    def launch(self, kernel: Kernel, values: Mapping[str, str], device: str) -> str:
        """The statement that launches a kernel with these arguments of its schema, given as expressions; `device` is
        that of its tensors, "" for the current one. Raises ReplayRefused."""
        named = kernel.qualified_name
        if not self._allowed:
            raise ReplayRefused(
                f"{self._reader.path}: {named} is code: a script of it has its source from the capture, "
                "which runs with the script; --allow-code allows that"
            )
        if kernel.kind is KernelKind.inductor_cpp:
            return self._cpp_call(kernel, values)
        stored = self._stored(kernel)
        try:
            call = _call(stored, self._section(stored.module), values)
        except KeyError as error:
            raise ReplayRefused(f"{named} cannot be launched by a script: it is not given {error}") from None
        except (ValueError, SyntaxError, RecursionError) as error:
            raise ReplayRefused(f"{named} cannot be launched by a script: {error}") from None
        self._calls.append(call)
        return f"with {device}: {call}" if device else call

    def _cpp_call(self, kernel: Kernel, values: Mapping[str, str]) -> str:
        """The call of a kernel that Inductor builds from its C++ source."""
        named = kernel.qualified_name
        try:
            stored = StoredCppKernel.read(contents_of(self._reader, kernel))
            arguments = stored.arguments
            if stored.source is None:
                raise ValueError("the capture has no source of it")
            given = ", ".join(values[each.name] for each in arguments)
        except (KeyError, ValueError) as error:
            raise ReplayRefused(f"{self._reader.path}: {named} cannot be in a script: {error}") from None
        types = [f"{'' if each.written else 'const '}{each.passed_as}" for each in arguments]
        lines = stored.source.partition(BINDINGS)[0].strip().splitlines(keepends=True)
        source = "\n    ".join(map(ascii, lines))
        built = f"compiling.cpp_pybinding(\n    {types!a},\n    {source},\n)"
        if built not in self._cpp:
            self._cpp[built] = self._free(f"cpp_kernel_{len(self._cpp)}", "", ())
            self._meanings[self._cpp[built]] = ""
        return f"{self._cpp[built]}({given})"

    def head(self) -> list[str]:
        if not self._kernels:
            return []
        said = _SWITCH if self.interpreted else "# These kernels were captured from Triton's compiler."
        return [said, "import os", "", f'os.environ["TRITON_INTERPRET"] = "{int(self.interpreted)}"', ""]

    def imports(self) -> list[str]:
        lines = ["import triton", "import triton.language as tl"] if self._kernels else []
        if any("TensorDescriptor(" in call for call in self._calls):
            lines.append("from triton.tools.tensor_descriptor import TensorDescriptor")
        if any("namedtuple(" in call for call in self._calls):
            lines.append("from collections import namedtuple")
        if not self.interpreted and any("make_tensor_descriptor" in each.text for each in self._sections.values()):
            lines += ["", *_MEMORY]
        return lines + ["from torch._inductor.async_compile import AsyncCompile"] * bool(self._cpp)

    def sections(self) -> list[str]:
        built = ["\n\n# ---- C++ of Inductor's, from the capture\n", "compiling = AsyncCompile()"] if self._cpp else []
        built += [f"{name} = {call}" for call, name in self._cpp.items()]
        built += ["compiling.wait(globals())"] * bool(self._cpp)
        return built + [
            f"\n\n# ---- source of Triton kernels, from the capture ({number} of {len(self._sections)})\n\n"
            + section.text.rstrip("\n")
            for number, section in enumerate(self._sections.values(), 1)
        ]

    def _stored(self, kernel: Kernel) -> StoredKernel:
        named = kernel.qualified_name
        if named not in self._kernels:
            try:
                stored = StoredKernel.read(contents_of(self._reader, kernel))
                if stored.source is None:
                    raise ValueError("the capture has no source of it")
            except ValueError as error:
                raise ReplayRefused(f"{self._reader.path}: {named} cannot be in a script: {error}") from None
            if self._kernels and (stored.target == INTERPRETER) is not self.interpreted:
                raise ReplayRefused(
                    f"{self._reader.path}: some of the Triton kernels were interpreted, others compiled; a process "
                    "does one of them, so select one kind for a script"
                )
            self._kernels[named] = stored
        return self._kernels[named]

    def _section(self, source: str) -> _Section:
        if source not in self._sections:
            renamed = {}
            words = set(_NAMES.findall(source))
            for name, meaning in _meanings(source).items():
                free = self._free(name, meaning, words)
                self._meanings[free] = meaning
                if free != name:
                    renamed[name] = free
            self._sections[source] = _Section(with_names(source, renamed), renamed)
        return self._sections[source]

    def _free(self, name: str, meaning: str, words: Collection[str]) -> str:
        """The name itself, or one like it that neither the script nor the source (of these words) has."""
        free, number = name, 1
        while not self._fits(free, meaning) or (free != name and free in words):
            number += 1
            free = f"{name}_{number}"
        return free

    def _fits(self, name: str, meaning: str) -> bool:
        if name in self._meanings:
            return bool(meaning) and self._meanings[name] == meaning
        return not _OF_RUN.match(name)


def _meanings(source: str) -> dict[str, str]:
    """The names that a source defines: for imports what they mean, "" for what is the source's own."""
    found: dict[str, str] = {}
    for symbol in symtable.symtable(source, "kernel", "exec").get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            found[symbol.get_name()] = ""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                one = ast.Import([alias])
                if isinstance(statement, ast.ImportFrom):
                    one = ast.ImportFrom(statement.module, [alias], statement.level)  # type: ignore[assignment]
                found[alias.asname or alias.name.partition(".")[0]] = ast.unparse(one)
    return found


class _Renaming(ast.NodeTransformer):
    """Gives what a module defines other names, and collects the edits of the text that do the same."""

    def __init__(self, source: str, renamed: Mapping[str, str]) -> None:
        self._lines = [line.encode() for line in source.splitlines()]
        self._renamed = renamed
        self._hidden: list[set[str]] = []  # what functions around have as names of their own
        self.edits: list[tuple[int, int, int, int, str]] = []

    def of_function(self, tree: ast.FunctionDef, table: symtable.SymbolTable) -> None:
        """Its name, and in it the names that mean the module's. Raises ValueError where one means both."""
        hidden = set()
        for name in self._renamed:
            kinds = {each.lookup(name).is_global() for each in _tables(table) if name in each.get_identifiers()}
            if len(kinds) > 1:
                raise ValueError(f"its function {tree.name} means two things by {name}, a name that the script has")
            if False in kinds:
                hidden.add(name)
        if tree.name in self._renamed:
            line = self._lines[tree.lineno - 1]
            start = line.index(tree.name.encode(), line.index(b"def") + 3)
            new = self._renamed[tree.name]
            self.edits.append((tree.lineno, start, tree.lineno, start + len(tree.name.encode()), new))
            tree.name = new
        tree.decorator_list = [self.visit(each) for each in tree.decorator_list]
        arguments = tree.args
        arguments.defaults = [self.visit(each) for each in arguments.defaults]
        arguments.kw_defaults = [each and self.visit(each) for each in arguments.kw_defaults]
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            each.annotation = each.annotation and self.visit(each.annotation)
        self._hidden.append(hidden)
        tree.body = [self.visit(each) for each in tree.body]
        self._hidden.pop()

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id not in self._renamed or any(node.id in hidden for hidden in self._hidden):
            return node
        new = self._renamed[node.id]
        self.edits.append((node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, new))
        return ast.Name(new, node.ctx)

    def of_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            bound = alias.asname or alias.name
            if bound in self._renamed:
                alias.asname = self._renamed[bound]
        self.edits.append(
            (
                statement.lineno,
                statement.col_offset,
                statement.end_lineno or 0,
                statement.end_col_offset or 0,
                ast.unparse(statement),
            )
        )


def _tables(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
    return [table, *(inner for child in table.get_children() for inner in _tables(child))]


def with_names(source: str, renamed: Mapping[str, str]) -> str:
    """A source in which what it defines has other names. Raises ValueError if that cannot be done."""
    if not renamed:
        return source
    tree = ast.parse(source)
    tables = symtable.symtable(source, "kernel", "exec").get_children()
    renaming = _Renaming(source, renamed)
    for place, statement in enumerate(tree.body):
        if isinstance(statement, ast.FunctionDef):
            (table,) = (
                each
                for each in tables
                if each.get_name() == statement.name and each.get_lineno() in _lines_of(statement)
            )
            renaming.of_function(statement, table)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            renaming.of_import(statement)
        else:
            tree.body[place] = renaming.visit(statement)
    text = edited(source, renaming.edits)
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        raise ValueError(f"its source cannot be given other names for {', '.join(renamed)}, which the script has")
    return text


def _lines_of(function: ast.FunctionDef) -> range:
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return range(first, function.lineno + 1)


def _call(stored: StoredKernel, section: _Section, values: Mapping[str, str]) -> str:
    """`kernel[grid](…)`. Raises KeyError for an argument that is not there, ValueError for what is no form."""
    name = section.function(stored.function)
    declared = section.functions[name].args
    parameters = [*declared.posonlyargs, *declared.args, *declared.kwonlyargs]
    if [each.arg for each in parameters] != list(stored.parameters):
        raise ValueError("its source and its metadata have different parameters")
    options = {option: given for option, given in stored.options.items() if option not in stored.parameters}
    by_name = not _OF_LAUNCHES & set(stored.parameters) and len(options) == len(stored.options)
    given, named = [], False
    for each in parameters:
        text = _parameter(stored.parameters[each.arg], section, values)
        constexpr = each.annotation is not None and ast.unparse(each.annotation).endswith("constexpr")
        named |= (each in declared.kwonlyargs) or (by_name and constexpr and each not in declared.posonlyargs)
        given.append(argument(each.arg, text) if named else text)
    given += [argument(option, values[each]) for option, each in options.items()]
    grid = values[stored.grid].strip("[]")
    if not grid:
        raise ValueError("its grid has no sizes")
    return f"{name}[({grid}{'' if ',' in grid else ','})]({', '.join(given)})"


def _parameter(form: Any, section: _Section, values: Mapping[str, str]) -> str:
    """The expression of a parameter, by its form (see `replayfmt.pytorch.triton.kernels`)."""
    inner: Callable[[Any], str] = lambda part: _parameter(part, section, values)  # noqa: E731
    match form:
        case str():
            return values[form]
        case {"tuple": list(parts), "class": str(kind), "fields": list(fields)}:
            texts = [argument(str(field), inner(part)) for field, part in zip(fields, parts, strict=True)]
            return f"namedtuple({identifier(kind)!a}, {[str(each) for each in fields]!a})({', '.join(texts)})"
        case {"tuple": list(parts)}:
            return f"({', '.join(map(inner, parts))}{',' if len(parts) == 1 else ''})"
        case {"list": list(parts)}:
            return f"[{', '.join(map(inner, parts))}]"
        case {"constexpr": part}:
            return f"tl.constexpr({inner(part)})"
        case {"dtype": str(name)}:
            return f"tl.dtype({values[name]})"
        case {"reinterpret": str(name), "as": str(kind)} if kind.startswith("torch."):
            return f"triton.reinterpret({values[name]}, torch.{identifier(kind.removeprefix('torch.'))})"
        case {"reinterpret": str(name), "as": str(kind)}:
            return f"triton.reinterpret({values[name]}, tl.dtype({kind!a}))"
        case {"descriptor": str(name), "shape": str(shape), "strides": str(strides), "block_shape": str(block)}:
            options = "".join(f", {key}={form[key]!a}" for key in _DESCRIPTOR_OPTIONS if key in form)
            required = f"{values[name]}, {values[shape]}, {values[strides]}, {values[block]}"
            return f"TensorDescriptor({required}{options})"
        case {"function": str(name)}:
            return section.function(name)
    raise ValueError(f"{form!a} is not the form of a parameter")
