"""Finding the module of an installed package that registers an operator, by reading the package's files.

Libraries move their operators from one module to another between versions. Nothing is imported here: Python sources are
searched for the call that registers the operator, extension modules for its schema.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

_REGISTERS = re.compile(r"custom_op|triton_op|\bLibrary\(")
_NOT_SEARCHED = frozenset({"test", "tests", "testing", "__pycache__"})
_LONGEST_SOURCE = 4 << 20  # bytes
_LONGEST_EXTENSION = 4 << 30
_MOST_FILES = 50_000


def modules_registering(package: str, namespace: str, name: str) -> list[str]:
    """The modules of an installed package whose files register `namespace::name`, the likeliest first.

    None if the package is not installed, or is not a folder.
    """
    namespace, name = re.escape(namespace), re.escape(name)
    whole = re.compile(rf"""["']{namespace}::{name}["'(.]""")
    in_library = re.compile(rf"""(?:op_name\s*=|custom_op\(|triton_op\(|\.define\()\s*f?["']{name}["'(. ]""")
    named, local = [], []
    for module, text in _registering(package):
        if whole.search(text):
            named.append(module)
        elif in_library.search(text):
            local.append(module)
    extensions = [
        module
        for module, path in _files(package)
        if not path.name.endswith(".py") and _contains(path, (f"{name}(".encode(), namespace.encode()))
    ]
    return [*named, *local, *extensions]


@lru_cache(maxsize=8)
def _registering(package: str) -> tuple[tuple[str, str], ...]:
    """The sources of a package that register operators, with their modules."""
    found = []
    for module, path in _files(package):
        if not path.name.endswith(".py") or path.stat().st_size > _LONGEST_SOURCE:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if _REGISTERS.search(text):
            found.append((module, text))
    return tuple(found)


@lru_cache(maxsize=8)
def _files(package: str) -> tuple[tuple[str, Path], ...]:
    """Every module of a package with its file, in the order of their names."""
    found = PathFinder.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files: list[tuple[str, Path]] = []
    for folder in map(Path, folders):
        for path in _below(folder):
            suffix = next((each for each in (*EXTENSION_SUFFIXES, ".py") if path.name.endswith(each)), None)
            if suffix is None or len(files) >= _MOST_FILES:
                continue
            parts = [package, *path.relative_to(folder).parts]
            parts[-1] = parts[-1].removesuffix(suffix)
            if parts[-1] == "__init__":
                parts.pop()
            if parts[-1] != "__main__" and all(part.isidentifier() for part in parts):
                files.append((".".join(parts), path))
    return tuple(files)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in _NOT_SEARCHED)
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file():
                yield path


def _contains(path: Path, texts: tuple[bytes, ...]) -> bool:
    if not 0 < path.stat().st_size <= _LONGEST_EXTENSION:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(text) >= 0 for text in texts)
