"""Notifies its callers when a module has been imported, by whatever importer and however late.

Hooks on libraries that the program may import later (Triton, Inductor), marks on the program's own functions and the
start of a capture itself wait for an import this way: nothing is imported for their sake. One finder at the front of
`sys.meta_path` serves every watch; it is there only while something is watched. It finds nothing itself: it asks the
other finders and gives the module's loader back untouched before the module's code runs, so that `__loader__`,
`inspect` and `importlib.resources` see what they would see without it. Imports no torch.
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
    """Stands in for a module's loader until the module's code is about to run."""

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
        # The program may have put another object in its place while it ran.
        self._notify(sys.modules.get(module.__name__, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(MetaPathFinder):
    """Answers for watched modules only, with what the other finders answer."""

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

    Where the module is imported already, it is called at once as well. What the callback raises reaches whoever imports
    the module, so callbacks deal with their own failures.
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
        """Call no more. Idempotent."""
        if not self._active:
            return
        self._active = False
        waiting = _finder.callbacks[self.module]
        waiting.remove(self._callback)
        if not waiting:
            del _finder.callbacks[self.module]
        if not _finder.callbacks and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
