"""Finds what a captured kernel is replayed with: an operator of the installed torch, or code in the capture.

For operators only the dispatcher is asked: a name in a file never causes an import that the file chose, only those that
the user allows (`AllowedImports`). A schema that has changed since the capture is accepted only if torch itself
considers it backward compatible. Kernels that are no operators run machine code or Python source from the file:
`AllowedCode` refuses them without `allow_code`, and no byte of their attachments is looked at. The resolver executes no
kernel code. Code is loaded only after every other check of the plan has passed.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from replayfmt.errors import InvalidCapture, UsageError, first_line
from replayfmt.format.attachments import contents_of, roles_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import name_problem
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import texts_of
from replayfmt.pytorch import collectives as _collectives  # noqa: F401  registers its operators
from replayfmt.pytorch import overloads
from replayfmt.pytorch.op_libraries import OpLibraries, printing_aside
from replayfmt.pytorch.operators import ALWAYS_THERE, acts_outside, operator_named
from replayfmt.pytorch.overloads import find_overload, is_registered, parse_schema, printed_schema

from ..planning.kernels import OperatorKernel, ResolvedKernel
from .code_kernels import prepare_triton, resolve_inductor_cpp, resolve_triton

IMPORT_FLAG = "--allow-import"
OPERATOR_FLAG = "--allow-operator"


class AllowedImports:
    """The user's allow-list for one plan. Every module on it is imported at once, before kernels are resolved.

    A name is a module (`torchvision`, `mylib.ops`), or the namespace of a library that is known (`_moe_C`: vllm's).
    `NAMESPACE=MODULE` also lets a capture call functions that the module itself defines, where no operator of that
    namespace is registered: a capture imported from a trace may have such calls.
    `problems` has a sentence for each that could not be imported.
    """

    def __init__(self, names: Iterable[str] = (), operators: Iterable[str] = ()) -> None:
        """`operators` are those that may run although they do more than compute. Raises UsageError for a name that is
        not an operator's, or that of an operator that needs no permission."""
        self._operators = frozenset(texts_of("allow_operators", operators))
        for operator in sorted(self._operators):
            if acts_outside(operator) is None or name_problem(operator, "default"):
                raise UsageError(
                    f"{OPERATOR_FLAG}={operator}: expected an operator that is refused without it, such "
                    "as aten::from_file"
                )
        allowed = tuple(dict.fromkeys(texts_of("allow_imports", names)))
        modules: list[str] = []
        registered: dict[str, tuple[str, ...]] = {}
        for name in allowed:
            namespace, pair, module = name.rpartition("=")
            if not all(part.isidentifier() for part in module.split(".")) or bool(pair) is not namespace.isidentifier():
                raise UsageError(
                    f"{IMPORT_FLAG}={name}: expected the name of a module, such as torchvision or mylib.ops, or "
                    "NAMESPACE=MODULE"
                )
            modules.append(module)
            if pair:
                registered[namespace] = (*registered.get(namespace, ()), module)
        self._libraries = OpLibraries(modules, registered, own=False)
        self.problems: list[str] = []
        for name in modules:
            self._import(name)

    def _import(self, name: str) -> None:
        try:
            with printing_aside():
                importlib.import_module(name)
        except Exception as error:  # a foreign library may fail in any way while it is imported
            if isinstance(error, ModuleNotFoundError) and self._libraries.modules_for(name):
                return  # the namespace of a known library, which is imported when an operator needs it
            self.problems.append(f"{IMPORT_FLAG}={name}: it cannot be imported: {type(error).__name__}: {error}")

    def allows_operator(self, name: str) -> bool:
        """Whether the user named this operator, `aten::from_file`, as one that may run."""
        return name in self._operators

    def provide(self, name: str, is_there: Callable[[], bool]) -> None:
        """Import what registers the operator `name`, as far as the user allows it, until it `is_there`."""
        if self._libraries.modules_for(name.partition("::")[0]):
            self._libraries.provide(name, is_there)

    def callable(self, namespace: str, name: str) -> Callable[..., Any] | None:
        """The function with the name of an unregistered operator, from a library that the user named."""
        return self._libraries.callable(namespace, name)

    def advice(self, namespace: str) -> str:
        """What to do about operators of a namespace that are still missing."""
        known = self._libraries.modules_for(namespace)
        if any(self._libraries.admits(namespace, module) for module in known):
            problem = self._libraries.load(namespace).problem
            return problem or (
                f"{' and '.join(known)} was imported and does not register it; if another module does: "
                f"{IMPORT_FLAG}=MODULE"
            )
        if known:
            # Of PyTorch's own modules only the one that is needed, not all that "torch" would admit.
            package = namespace if known[0].startswith("torch.") else known[0].partition(".")[0]
            return f"{known[0]} registers {namespace!r}: {IMPORT_FLAG}={package} lets it be imported"
        return (
            f"import the library that registers namespace {namespace!r} before making the plan, or name it: "
            f"{IMPORT_FLAG}=MODULE"
        )


CODE_FLAG = "--allow-code"
# What makes a kernel of its attachments, by role (replayfmt.format.attachments says which roles are given), for a
# replay on these types of devices; or a sentence that says why it cannot, beginning with the kernel's name. It checks
# that they go together; the kernel compiles, loads and imports them when it is loaded. It is called only where the user
# allowed that.
Resolver = Callable[[Kernel, Callable[[], Mapping[str, bytes]], frozenset[str]], ResolvedKernel | str]

RESOLVERS: dict[KernelKind, Resolver] = {
    KernelKind.triton: resolve_triton,
    KernelKind.inductor_cpp: resolve_inductor_cpp,
}


class AllowedCode:
    """Whether code of one capture may run. `device_types` are those that the replay uses."""

    def __init__(self, reader: CaptureReader, allowed: bool, device_types: frozenset[str]) -> None:
        self._reader, self._allowed, self._device_types = reader, allowed, device_types
        self._refused: Counter[KernelKind] = Counter()

    def prepare(self) -> None:
        """Before anything of the user's is imported: have libraries imported as the kernels need them."""
        if self._allowed and any(
            kernel is not None and kernel.kind is KernelKind.triton for kernel in self._reader.kernels
        ):
            prepare_triton(self._device_types)

    def resolve(self, kernel: Kernel) -> ResolvedKernel | str:
        """The kernel, or a sentence that says why there is none."""
        named = f"{kernel.qualified_name} is a kernel of the kind {kernel.kind.name}"
        resolver = RESOLVERS.get(kernel.kind)
        if resolver is None:
            return f"{named}; this version does not replay them"
        if not kernel.attachments:
            return f"{named}, and its code is not in the capture"
        if not self._allowed:
            self._refused[kernel.kind] += 1
            roles = ", ".join(roles_of(self._reader, kernel))
            return f"{named}: its code is in the capture ({roles}), and runs only with {CODE_FLAG}"
        try:
            contents = contents_of(self._reader, kernel)
        except InvalidCapture as error:
            return f"{named} with attachments that cannot be used: {error}"
        return resolver(kernel, lambda: contents, self._device_types)

    @property
    def advice(self) -> str:
        """What to do about the kernels that were refused for want of leave; "" if none was."""
        if not self._refused:
            return ""
        kinds = ", ".join(f"{kind.name} {count:,}" for kind, count in sorted(self._refused.items()))
        eager = (
            "; a capture with --compiled=eager has operators in place of what Inductor generated"
            if self._refused[KernelKind.inductor_cpp]
            else ""
        )
        return (
            f"kernels of the capture are code ({kinds}): if you trust whoever made it, replay with {CODE_FLAG} "
            f"(opreplay-dump --attachment=ID shows the code){eager}"
        )


def resolve(
    kernel: Kernel,
    captured_torch: str | None,
    imports: AllowedImports | None = None,
    code: AllowedCode | None = None,
    graphs: Callable[[Kernel], ResolvedKernel | str] | None = None,
) -> ResolvedKernel | str:
    """What a captured kernel is replayed with, or a sentence that says why there is nothing. `imports`: what the user
    allows to be imported for an unknown operator; `code`: whether a kernel that is no operator may be made of the code
    in the capture; `graphs` makes those of graphs."""
    named = kernel.qualified_name
    if kernel.kind is KernelKind.graph and graphs is not None:
        return graphs(kernel)
    if kernel.kind is not KernelKind.operator:
        return code.resolve(kernel) if code is not None else f"{named} is no operator, but a {kernel.kind.name} kernel"
    namespace = kernel.name.partition("::")[0]
    imports = imports or AllowedImports()
    does = acts_outside(kernel.name)
    known = operator_named(kernel.name)
    if does is not None and not known.unchecked_view and not imports.allows_operator(kernel.name):
        if known.collective:
            return f"{named} is a collective; they are not replayed yet"
        return f"{named} {does}; such host calls are not replayed unless {OPERATOR_FLAG}={kernel.name} allows it"
    overload = find_overload(kernel.name, kernel.overload)
    if overload is None and namespace not in ALWAYS_THERE:
        imports.provide(kernel.name, lambda: is_registered(kernel.name, kernel.overload))
        overload = find_overload(kernel.name, kernel.overload)
        if overload is None and kernel.overload == overloads.CALLABLES_OVERLOAD:
            return _by_types(kernel, imports)
        if overload is None:
            return f"{named} does not exist in torch {torch.__version__}; {imports.advice(namespace)}"
    if overload is None:
        return f"{named} does not exist in torch {torch.__version__}"
    difference = _schema_difference(kernel, overload, captured_torch)
    if difference:
        return difference
    return OperatorKernel(overload, known.own, torch.Tag.nondeterministic_seeded in overload.tags)


def _by_types(kernel: Kernel, imports: AllowedImports) -> ResolvedKernel | str:
    """A function from a library that the user named, called by the argument types that a trace recorded."""
    namespace, _separator, base = kernel.name.partition("::")
    function = imports.callable(namespace, base)
    if function is None:
        return (
            f"{kernel.name} is a function without a schema, and no library was named for {namespace!r} that has "
            f"it: {IMPORT_FLAG}={namespace}=MODULE lets the capture call the functions that MODULE defines"
        )
    try:
        return OperatorKernel(overloads.as_operator(kernel.schema, function), False, False)
    except (RuntimeError, ValueError) as error:
        return f"{kernel.qualified_name}: its captured schema cannot be read ({first_line(error)})"


def _schema_difference(kernel: Kernel, overload: OpOverload, captured_torch: str | None) -> str | None:
    here = printed_schema(overload._schema)
    if here == kernel.schema:
        return None
    versions = f"captured with torch {captured_torch or 'of an unknown version'}, this is torch {torch.__version__}"
    try:
        captured = parse_schema(kernel.schema)
        compatible = overload._schema.is_backward_compatible_with(captured)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, IndexError) as error:  # IndexError: the numbers of arguments differ
        return f"{kernel.qualified_name}: its captured schema cannot be read ({first_line(error)}); {versions}"
    if compatible:
        return None
    return f"{kernel.qualified_name} changed: captured {kernel.schema!r}, here {here!r}; {versions}"
