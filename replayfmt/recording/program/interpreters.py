"""Recognizes commands that run Python programs: they may do part of the program's work on the devices.

Most commands do not (git, nvcc, uname), nor do the Python programs that compilers, multiprocessing and packaging start
for themselves. Listing those would only teach users to ignore the note.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Any

_PYTHON = re.compile(r"\A(python|pypy)[\d.]*(\.exe)?\Z")
_ASSIGNMENT = re.compile(r"\A\w+=")
_WITH_VALUE = ("-W", "-X")  # flags of the interpreter with a value of their own
_HELPER_MODULES = re.compile(
    r"\A(pip|ensurepip|venv|virtualenv|site|sysconfig|platform|compileall|py_compile|setuptools|build|ninja|triton"
    r"|torch\._inductor|torch\.utils\.collect_env|multiprocessing)(\.|\Z)"
)
# The last of these is how Inductor checks whether a library that it built can be loaded.
_HELPER_CODE = re.compile(
    r"\bmultiprocessing\.(resource_tracker|forkserver|spawn)\b"
    r"|\bcdll\.LoadLibrary\([^)]*\)\s*\Z"
)
_HELPER_SCRIPTS = re.compile(r"(\A|[/\\])(torch[/\\]_inductor|triton|setup\.py)([/\\]|\Z)")


def runs_python_program(arguments: Any, *, executable: Any = None) -> bool:
    """Whether a command, as `subprocess.Popen` or `os.posix_spawn` take it, is a Python interpreter with a program to
    run. A command in one string is split as a shell splits its first words."""
    words = _words(arguments)
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("exec", "env", "nohup")):
        words = words[1:]
    program = os.fsdecode(executable) if executable is not None else words[0] if words else ""
    return _is_python(program) and not _is_helper(words[1:])


def _words(arguments: Any) -> list[str]:
    if isinstance(arguments, (str, bytes, os.PathLike)):
        try:
            return shlex.split(os.fsdecode(arguments))
        except ValueError:  # a quote that is never closed: the shell will say so
            return []
    return [os.fsdecode(word) for word in arguments]


def _is_python(program: str) -> bool:
    return bool(_PYTHON.match(os.path.basename(program))) or (bool(sys.executable) and program == sys.executable)


def _is_helper(words: list[str]) -> bool:
    """Whether an interpreter with these arguments runs none of the program's own code."""
    following = iter(words)
    for word in following:
        if word == "-m":
            return bool(_HELPER_MODULES.match(next(following, "")))
        if word == "-c":
            return bool(_HELPER_CODE.search(next(following, "")))
        if word in ("-V", "--version", "-h", "--help"):
            return True
        if word in _WITH_VALUE:
            next(following, None)
        elif not word.startswith("-") or word == "-":
            return bool(_HELPER_SCRIPTS.search(word))
    return False
