"""Importing the libraries that register operators: those the user allows, never one that only a capture names.

PyTorch knows a custom operator once the library that registers it has been imported. A capture only says which
operators it calls; what is imported for them is what the user named, including PyTorch's own modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.arguments import texts_of
from replayfmt.format.operator_names import name_problem
from replayfmt.pytorch.op_libraries import OpLibraries, printing_aside
from replayfmt.pytorch.operators import acts_outside

FLAG = "--allow-import"
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
                    f"{FLAG}={name}: expected the name of a module, such as torchvision or mylib.ops, or "
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
            self.problems.append(f"{FLAG}={name}: it cannot be imported: {type(error).__name__}: {error}")

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
                f"{' and '.join(known)} was imported and does not register it; if another module does: {FLAG}=MODULE"
            )
        if known:
            # Of PyTorch's own modules only the one that is needed, not all that "torch" would admit.
            package = namespace if known[0].startswith("torch.") else known[0].partition(".")[0]
            return f"{known[0]} registers {namespace!r}: {FLAG}={package} lets it be imported"
        return (
            f"import the library that registers namespace {namespace!r} before making the plan, or name it: "
            f"{FLAG}=MODULE"
        )
