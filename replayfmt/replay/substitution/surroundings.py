"""The surroundings that a replacement's own code may rely on, and captured kernels do not need.

A replay disables PyTorch's Python dispatch: captured kernels are below it. User code may need it: functions compiled by
torch.compile and tensor subclasses do. It is enabled once for a whole run, with the original kernels as well as with
the replacements, so that it adds no cost per call to either. The caller's active modes stay disabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def python_dispatch() -> Iterator[None]:
    """Enable Python dispatch and `__torch_function__` inside a replay, as a program has them."""
    with (
        _disable_current_modes(),
        torch._C._EnableTorchFunction(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False),
    ):
        yield
