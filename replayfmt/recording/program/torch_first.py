"""Makes sure that torch is imported before the modules of this package that need it.

A program may ask for `replayfmt.scope` before it imports torch. Importing torch starts the recorder, which needs those
modules to be complete, so they must not be half imported at that moment. Does not import torch itself until then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __package__.partition(".")[0]
_NEED_TORCH = frozenset(f"{_PACKAGE}.{name}" for name in ("pytorch", "recording.recorder", "replay", "benchmark"))


class TorchFirst(MetaPathFinder):
    """Finds nothing itself. Installed until torch has been imported."""

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NEED_TORCH or "torch" in sys.modules:
            return None
        importlib.import_module("torch")
        # That may have imported this very module; importing it once more would make a second one.
        module = sys.modules.get(fullname)
        if module is None:
            return None
        spec = ModuleSpec(fullname, _Existing(module))
        module.__spec__ = spec  # the import system takes the spec of a module that turned up while it searched
        return spec


class _Existing(Loader):
    """ "Loads" a module that was imported in the meantime, by leaving it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
