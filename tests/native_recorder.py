"""Tests that need the native recorder."""

from __future__ import annotations

import pytest

from replayfmt.native.building import NotAvailable
from replayfmt.native.hook import dispatch_hook

# What the machine lacks. A compiler that fails is a mistake in the recorder.
_OF_THE_MACHINE = (
    "no C++ compiler",
    "not made for this PyTorch",
    "this PyTorch has no headers",
    "this Python has no headers",
)


def require_native_recorder() -> None:
    """Skip the test where the machine cannot have the native recorder, and fail it where the recorder cannot be built
    for another reason."""
    found = dispatch_hook()
    if isinstance(found, NotAvailable):
        told = f"the native recorder cannot be built here ({found})"
        (pytest.skip if found.reason in _OF_THE_MACHINE else pytest.fail)(told)
