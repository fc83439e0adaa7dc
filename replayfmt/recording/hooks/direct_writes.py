"""Functions of PyTorch that write memory without an operator: the new content is imported at its next use.

`apply_` and the `map_` family call Python code for each element; a storage reads a file into itself, swaps its bytes or
its memory, or is reallocated; NCCL is called directly. NumPy views and the like are in host_reads.py. Writes through an
address (`data_ptr`, ctypes, a C extension) are seen only by an audit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ..dispatch.kernels import tensors_in
from ..frames import leave_no_frames
from ..storages.storage_content import sample
from .patches import Patch, Patched, PatchSet, StandIn

if TYPE_CHECKING:
    from ..core import Core

_T = TypeVar("_T")
_ELEMENTWISE = ("apply_", "map_", "map2_")
_STORAGE = ("_byteswap", "_set_from_file", "_swap_data_ptr_")
_ALLOCATION = ("resize_", "_resize_with_addr_")
_NCCL = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


class RecorderForWrites(Protocol):
    """What the direct writes need from a recorder."""

    def recording(self) -> bool: ...

    def attempt(self, step: Callable[..., _T], *args: Any) -> _T | None: ...

    def mark_outside_write(self, tensor: torch.Tensor) -> bool: ...

    def storage_written(self, storage: torch.UntypedStorage) -> None:
        """Something unseen wrote to a storage."""
        ...

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was reallocated, outside any op."""
        ...


def storage_written(core: Core, storage: torch.UntypedStorage) -> None:
    """Something unseen wrote to a storage."""
    tracker = core.storages.tracker_of(storage)
    if tracker is not None:
        core.storages.mark_written_outside(tracker)


def about_to_be_written(core: Core, storage: torch.UntypedStorage) -> None:
    """An op writes all of its bytes next, and reads none: what was written from outside does not have to enter."""
    tracker = core.storages.tracker_of(storage)
    if tracker is not None and tracker.state is not None and tracker.state.alias_of is None:
        tracker.state.outside = None


def storage_resized(core: Core, storage: torch.UntypedStorage) -> None:
    """A storage was reallocated outside any op."""
    tracker = core.storages.tracker_of(storage)
    if tracker is not None and tracker.size != storage.nbytes():
        if not tracker.alias:
            core.storages.measure(tracker, storage, sample(storage))
        core.storages.use(tracker, storage, False, "resize_")


class DirectWrites(Patched):
    """The patches of one capture that see direct writes."""

    def __init__(self, recorder: RecorderForWrites) -> None:
        writes = functools.partial(_Write, recorder)
        self._patches = PatchSet(
            [Patch("torch", f"Tensor.{name}", functools.partial(writes, 1)) for name in _ELEMENTWISE]
            + [Patch("torch.storage", f"UntypedStorage.{name}", functools.partial(writes, 2)) for name in _STORAGE]
            + [
                Patch("torch.storage", f"UntypedStorage.{name}", functools.partial(_resize, recorder))
                for name in _ALLOCATION
            ]
            + [Patch("torch.cuda.nccl", name, functools.partial(writes, None)) for name in _NCCL]
        )


class _Write(StandIn):
    """Replaces one function that writes to tensors or storages among its first `count` arguments (None: all of
    them)."""

    def __init__(self, recorder: RecorderForWrites, count: int | None, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._recorder = recorder
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observed = self._recorder.recording()
        try:
            return self._original(*args, **kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise
        finally:  # it may have written a part before it raised
            if observed:
                written = (*args[: self._count], *(kwargs.values() if self._count is None else ()))
                self._recorder.attempt(self._tell, written)

    def _tell(self, values: tuple[Any, ...]) -> None:
        for tensor in tensors_in(values):
            self._recorder.mark_outside_write(tensor)
        for value in values:
            if isinstance(value, torch.UntypedStorage):
                self._recorder.storage_written(value)


def _resize(recorder: RecorderForWrites, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        try:
            resized = original(storage, *args, **kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise
        if recorder.recording():
            recorder.attempt(recorder.storage_resized, storage)
        return resized

    return resize
