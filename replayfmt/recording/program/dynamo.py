"""Keeps Dynamo out of the recorder's own code.

While a compiled function runs that Dynamo could not compile as a whole, it looks at each frame of Python that is called
on the way: the recorder's, too, which is called around every operator and in place of PyTorch's functions. These would
be compiled, with the program's operators and the recorder's state as their constants.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .. import core
from ..dispatch.native_mode import NativeMode
from .module_scopes import ModuleScopes

_PACKAGE = __name__.partition(".")[0]


@functools.cache
def keep_dynamo_out() -> None:
    """Have Dynamo leave the recorder's frames alone, for as long as the process lives. What the program's operators
    call in between is not the recorder's."""
    dynamo = torch._C._dynamo.eval_frame
    skip, go_on = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for code in _codes(module):
                dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, go_on))
    whole = (  # with what they call, which is never the program's; the second's code is that of all attempted methods
        core.Core.attempt,
        core.Core.before,
        NativeMode.before,
        NativeMode.after,
        ModuleScopes._begin,
        ModuleScopes._end,
    )
    for function in whole:
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions, of its classes' methods, and of the functions that these make."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if isinstance(value, type) else [value]:
            for each in (member.fget, member.fset) if isinstance(member, property) else [member]:
                yield from _codes_of(each)


def _codes_of(member: Any) -> Iterator[CodeType]:
    function = getattr(member, "__func__", member)
    while isinstance(function, FunctionType):
        if function.__globals__.get("__name__", "").partition(".")[0] == _PACKAGE:  # not a decorator's of another's
            yield from _nested(function.__code__)
        function = getattr(function, "__wrapped__", None)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
