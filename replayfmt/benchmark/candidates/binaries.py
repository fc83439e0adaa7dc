"""A cubin as a candidate for a Triton kernel. It is launched by what launches one that is substituted in a replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.pytorch.triton.compiled import given_binary
from replayfmt.pytorch.triton.kernels import StoredKernel
from replayfmt.replay.planning.kernels import ResolvedKernel, StoredCodeKernel
from replayfmt.replay.resolution.kernel_lookup import RESOLVERS
from replayfmt.replay.substitution.loading import read_cubin

LAUNCH = "launch"  # the folder in a task's that has the attachments of a Triton kernel, by role


def launched(folder: Path, task: dict[str, Any], path: str, entry: str) -> Callable[..., Any]:
    """A function that launches a cubin with the arguments of the task's kernel. Raises ValueError with the reason if
    it cannot take the place of the captured binary, or cannot be launched here."""
    name, overload = task["operator"], task["name"].rpartition(".")[2]
    if task["kind"] != KernelKind.triton.name:
        raise ValueError(f"a cubin takes the place of a Triton kernel, which {task['name']} is not")
    if not (folder / LAUNCH).is_dir():
        raise ValueError(f"the task has several kernels of the name {name}; export that of one, as --kernel={name}.v…")
    contents = {each.name: each.read_bytes() for each in (folder / LAUNCH).iterdir()}
    try:
        given = read_cubin(path, entry)
    except UsageError as error:
        raise ValueError(str(error)) from None
    stored = StoredKernel.read(contents).binary
    if stored is None:
        raise ValueError(f"the capture has no binary of {name}, as which it would be launched")
    captured = SimpleNamespace(**stored.target)
    given_binary(stored, given, captured, stored.triton, sys.maxsize)  # what can be told without the device
    kinds = {each["device"].partition(":")[0] for workload in task["workloads"] for each in workload["storages"]}
    kernel = Kernel(name, overload, task["schema"], KernelKind.triton)
    found: ResolvedKernel | str = RESOLVERS[KernelKind.triton](kernel, lambda: contents, frozenset(kinds))
    if isinstance(found, StoredCodeKernel):
        found = found.loaded()
    if isinstance(found, str):
        raise ValueError(found)
    return found.with_binary(given).call
