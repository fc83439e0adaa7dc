"""Patches functions of other libraries while a capture runs, and restores them all.

A patch is a row: the module, the attribute, and what wraps the original. Where the module is not imported yet (Triton,
Inductor), `Watch` applies the patch once any importer has imported it: nothing is imported on a patch's behalf. One
finder at the front of `sys.meta_path` serves all watches and is installed only while there are any. It finds nothing
itself: it asks the other finders, and restores the module's own loader before the module's code runs. Imports no torch.

`HookHost` is what the hooks of a capture, which are patches, ask and tell the recorder.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any, Protocol, TypeVar

from .frames import leave_no_frames

Callback = Callable[[ModuleType], None]
_T = TypeVar("_T")


class HookHost(Protocol):
    """What hooks need from the recorder (recorder.py)."""

    @property
    def session(self) -> Any:
        """What the capture in progress knows: a `Session` of stream/session.py, which imports torch."""

    # What this thread is doing

    def present(self) -> bool:
        """Whether it is observed now: not paused, not inside an op. Recording may still have to begin."""

    def recording(self) -> bool:
        """Whether an op that it issued now would be recorded."""

    def launching(self) -> bool:
        """It is about to do work without an operator. Returns whether it is being recorded."""

    def inside(self) -> bool:
        """Whether it is inside an op, or in the recorder's own work. Threads of PyTorch's that do not take part just
        now (at the end of a backward pass) are not."""

    def within(self) -> bool:
        """Likewise, also before recording has begun."""

    def sees_first(self) -> bool:
        """Whether the recorder alone sees what it calls now: no mode of the program lies above or below."""

    def mode_here(self) -> Any:
        """The `RecordingMode` that sees what it does now: the one that records it, or observes an operator. Or None."""

    def graph_here(self) -> bool:
        """Whether what it does now, outside of ops, is seen as part of a graph."""

    def is_on(self) -> bool:
        """Whether recording has begun and goes on."""

    def in_any_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded also where C++ code calls it in a thread of its own."""

    def paused(self) -> AbstractContextManager[Any]:
        """Inside, it records nothing."""

    def hidden(self) -> AbstractContextManager[Any]:
        """Inside, nothing that it calls is recorded or observed."""

    # What happened

    def attempt(self, step: Callable[..., _T], *args: Any) -> _T | None:
        """Run recorder code: a failure in it ends the recording, not the program."""

    def tell(self, what: Callable[..., _T], *args: Any) -> _T | None:
        """Call `what` with the `CaptureSession` and these, under its lock and as an attempt, if recording is on."""

    def issue(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a kernel (`CapturedKernel`), and record that if this thread is being recorded. Returns its result."""

    def unsupported(self, reason: str, op: str, detail: str) -> int | None:
        """Work that cannot be reproduced. Returns the record's signature, if it has one."""

    def unsupported_throughout(self, reason: str, op: str, detail: str) -> None:
        """Some work cannot be seen, however often it is done: say so once, when recording begins, or now if it has."""

    def mark_outside_write(self, tensor: Any) -> bool:
        """Something unseen may have written a tensor: its content is imported again at its next use. Returns whether
        another such write would change nothing until then (`Outside.written`)."""

    def host_read(self, method: str, tensor: Any) -> None:
        """A value left the device for the host: it is recorded if this thread is."""

    def watch(self, storage: Any, *, windowed: bool = True) -> None:
        """Others may write to a storage from now on: its content is checked before each use. `windowed`: the program
        has a window on it."""

    def module_scope_begin(self, name: str) -> None: ...
    def module_scope_end(self, name: str) -> None: ...


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


@dataclass(frozen=True)
class Patch:
    """One replacement: `wrap(original)` replaces `attribute` of `module`.

    `attribute` is `name` or `Class.name`; the class may be a shell pattern if a family of classes shares the method.
    `reason`: the reason of the `unsupported` records that it makes, if it makes any. `vital`: without this target, work
    of that kind would go unseen.
    """

    module: str
    attribute: str
    wrap: Callable[[Any], Any]
    reason: str = ""
    vital: bool = False

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"

    @property
    def missing(self) -> str:
        """What is said where this build lacks the target."""
        return f"this build has no {self.target}, so work that goes through it cannot be seen"


def report_missing(recorder: HookHost, patch: Patch) -> None:
    """A target is missing: its work would go unseen, so no strict replay may trust the capture."""
    recorder.unsupported_throughout(patch.reason, patch.target, patch.missing)


def around(
    hook: Callable[..., Any], leave: Callable[[BaseException], None] = leave_no_frames
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a patch: each call of the original is one of `hook(original, ...)`. What that raises shows no frame of the
    recorder's (`leave`)."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(original, *args, **kwargs)
            except BaseException as error:
                leave(error)
                raise

        return call

    return wrap


class StandIn:
    """Replaces one method or function. Subclasses define what a call does.

    It equals the original and hashes like it, because `__torch_function__` receives this object, and libraries have
    tables keyed by the original.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        functools.update_wrapper(self, original)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class _Applied:
    holder: Any  # the class or module that was changed
    name: str
    own: bool  # the holder had an attribute of its own, not an inherited one
    original: Any  # the attribute, as it was in the holder's namespace
    replacement: Any


class PatchSet:
    """The patches of one capture. `missing` lists rows without a target among the modules imported so far."""

    def __init__(self, patches: Iterable[Patch], on_missing: Callable[[Patch], None] | None = None) -> None:
        """`on_missing` is called for each row whose module is imported but lacks the target, as soon as that is
        known."""
        self._patches = tuple(patches)
        self._on_missing = on_missing
        self._applied: list[_Applied] = []
        self._watches: list[Watch] = []
        self.missing: list[Patch] = []

    def install(self) -> None:
        """Apply what can be applied now, and the rest as soon as its module is imported."""
        for patch in self._patches:
            self._watches.append(Watch(patch.module, functools.partial(self._apply, patch)))

    def remove(self) -> None:
        """Restore everything, last first. Idempotent. Attributes that others have replaced since then are left
        alone."""
        for watch in self._watches:
            watch.stop()
        self._watches.clear()
        while self._applied:
            done = self._applied.pop()
            if vars(done.holder).get(done.name) is not done.replacement:
                continue
            if done.own:
                setattr(done.holder, done.name, done.original)
            else:
                delattr(done.holder, done.name)

    def _apply(self, patch: Patch, module: ModuleType) -> None:
        """Never raises: the program may be what imports the module. A target that cannot be replaced is missing."""
        try:
            found = self._replace(patch, module)
        except Exception:
            found = False
        if not found:
            self.missing.append(patch)
            if self._on_missing is not None:
                with suppress(Exception):  # where warnings are errors, say
                    self._on_missing(patch)

    def _replace(self, patch: Patch, module: ModuleType) -> bool:
        holders, name = targets(module, patch.attribute)
        for holder in holders:
            own = name in vars(holder)
            original = vars(holder)[name] if own else inspect.getattr_static(holder, name)
            if any(done.replacement is original for done in self._applied):
                continue  # the module was executed again and kept our replacement
            replacement = patch.wrap(original)
            setattr(holder, name, replacement)
            self._applied.append(_Applied(holder, name, own, original, replacement))
        return bool(holders)


def targets(module: ModuleType, attribute: str) -> tuple[list[Any], str]:
    """The objects on which to set `attribute` (none if this build has no such target), and its last name.

    Not every member of a family needs to define the method: those that inherit it are covered by their base class.
    """
    owner, _, name = attribute.rpartition(".")
    if not owner:
        return ([module] if hasattr(module, name) else []), name
    if any(mark in owner for mark in "*?["):
        classes = (value for key, value in vars(module).items() if fnmatchcase(key, owner))
        unique = {id(c): c for c in classes if isinstance(c, type) and name in vars(c)}
        return list(unique.values()), name
    holder: Any = module
    for part in owner.split("."):
        holder = getattr(holder, part, None)
    return ([holder] if holder is not None and hasattr(holder, name) else []), name


class Patched:
    """Base of classes with a set of patches, `_patches`, applied while installed."""

    _patches: PatchSet

    @property
    def missing(self) -> list[str]:
        """The targets that do not exist in this build."""
        return [patch.target for patch in self._patches.missing]

    def install(self) -> None:
        self._patches.install()

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
