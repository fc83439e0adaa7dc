"""Keeps Dynamo out of the recorder's own code.

While a compiled function runs that Dynamo could not compile as a whole, it looks at each frame of Python that is called
on the way: the recorder's, too, which is called around every operator. These would be compiled, with the program's
operators and the recorder's state as their constants.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import torch

from .. import core
from ..custom_operators import observing
from ..dispatch import mode, native_mode
from .presence import HookPresence


@functools.cache
def keep_dynamo_out() -> None:
    """Have Dynamo leave the recorder's frames alone, for as long as the process lives. What the program's operators
    call in between is not the recorder's."""
    dynamo = torch._C._dynamo.eval_frame
    skip, go_on = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for module in (mode, native_mode, observing):
        for code in _codes(module):
            dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, go_on))
    whole = (core.Core.attempt, core.Core.before, HookPresence.forced)  # the second's is that of all attempted methods
    for function in whole:
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions, and of its classes' methods."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield function.__code__
