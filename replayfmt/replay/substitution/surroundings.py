"""The surroundings that a replacement's own code may rely on, and captured kernels do not need.

A replay hides PyTorch's Python dispatch from itself: captured kernels are below it. Code of the user may need it: a
function compiled by torch.compile does, so do tensor subclasses. It is let in once around a whole run, with the
original kernels as well as with the replacements, so that neither pays for it at a call. Modes that the caller is in
stay out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def python_dispatch() -> Iterator[None]:
    """Inside a replay's surroundings: Python dispatch and `__torch_function__` as a program has them."""
    with (
        _disable_current_modes(),
        torch._C._EnableTorchFunction(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False),
    ):
        yield
