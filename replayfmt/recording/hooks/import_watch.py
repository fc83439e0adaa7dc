"""Notifies callers when a module has been imported, by any importer and at any time.

Hooks on libraries that the program may import later (Triton, Inductor), marks on the program's own functions and the
start of a capture itself wait for an import this way: nothing is imported on their behalf. One finder at the front of
`sys.meta_path` serves all watches; it is installed only while there are any. It finds nothing itself: it asks the other
finders, and restores the module's own loader before the module's code runs, so `__loader__`, `inspect` and
`importlib.resources` behave as without it. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _NotifyingLoader(Loader):
    """Replaces a module's loader until the module's code is about to run."""

    def __init__(self, inner: Any, notify: Callback) -> None:
        self._inner = inner
        self._notify = notify

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        # The module may have replaced itself in sys.modules while it ran.
        self._notify(sys.modules.get(module.__name__, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(MetaPathFinder):
    """Finds watched modules only, by asking the other finders."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.callbacks:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _NotifyingLoader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        for callback in tuple(self.callbacks.get(module.__name__, ())):
            callback(module)


_finder = _Finder()


class Watch:
    """One callback for one module. It is called after each import of the module, until `stop()`.

    If the module is already imported, it is also called at once. Its exceptions would reach the importer of the module,
    so callbacks must handle their own failures.
    """

    def __init__(self, module: str, callback: Callback) -> None:
        self.module = module
        self._callback = callback
        self._active = True
        _finder.callbacks.setdefault(module, []).append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        present = sys.modules.get(module)
        if present is not None:
            callback(present)

    def stop(self) -> None:
        """Stop calling. Idempotent."""
        if not self._active:
            return
        self._active = False
        waiting = _finder.callbacks[self.module]
        waiting.remove(self._callback)
        if not waiting:
            del _finder.callbacks[self.module]
        if not _finder.callbacks and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
