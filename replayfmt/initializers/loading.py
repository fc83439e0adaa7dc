"""Loads initializers from a Python file that the user names. The file is executed: naming it is the permission."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.regular_files import require_regular_file
from replayfmt.pytorch.op_libraries import printing_aside

from .initializer import Initializer
from .registry import collecting

FLAG = "--replay-initializer"

_numbers = count(1)


def load_initializers(path: str) -> tuple[Initializer, ...]:
    """What a file registers, in order. Raises UsageError if it cannot be read or run, or registers nothing."""
    try:
        require_regular_file(path)
        source = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{FLAG}={path}: cannot be read: {reason}") from None
    # Its classes look up their module by name; no import can collide with this name.
    module = ModuleType(f"replayfmt initializers {next(_numbers)}: {path}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    with collecting() as found, printing_aside():
        try:
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        except OpReplayError as error:
            raise UsageError(f"{FLAG}={path}: {error}") from None
        except (Exception, SystemExit) as error:
            raise UsageError(f"{FLAG}={path}: {_where(error, path)}{type(error).__name__}: {error}") from error
    if not found:
        raise UsageError(
            f"{FLAG}={path}: it registers no initializer; decorate functions with @replayfmt.initializers.register(...)"
        )
    return tuple(replace(each, origin=path) for each in found)


def _where(error: BaseException, path: str) -> str:
    """`line 7: `, the line of the file at which the error was raised or passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError):
        return ""
    return f"line {lines[-1]}: " if lines else ""
