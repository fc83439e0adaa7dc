"""Every private name of PyTorch that the package uses is in `private_names`, which says which versions have it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
from private_names import EVERYWHERE, LOOKED_AT, NAMES

from .test_tree import ROOT

_DOTTED = re.compile(r"\btorch(?:\.[A-Za-z_]\w*)+")
_MISSING = object()
# Of Python's standard library and of Triton.
_NOT_OF_PYTORCH = {
    "_NamedFuncPointer",
    "_allocator",
    "_asdict",
    "_current_frames",
    "_exit",
    "_getframe",
    "_at_fork_reinit",
    "_is_owned",
    "_pack_args",
    "_run_module_as_main",
    "_value2member_map_",
} | {"_grouped_mm", "_safe_softmax", "_softmax", "_sparse_compressed_tensor_unsafe", "_to_copy"}  # operators


def is_private(name: str) -> bool:
    """Operators (`torch.ops`) are no names of Python's: schemas say what versions have."""
    return not name.startswith("torch.ops.") and any(
        part.startswith("_") and not part.startswith("__") for part in name.split(".")
    )


def chain(node: ast.expr) -> str:
    """`torch.a.b` of such an expression, or ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(parts)]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def names_in(tree: ast.Module) -> Iterator[str]:
    """The names of PyTorch in a module: as expressions, imports and in strings that are no docstrings."""
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield chain(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("torch."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield from _DOTTED.findall(node.value)
            # Names of functions that are looked up in torch._C.
            if node.value.startswith("_") and node.value.isidentifier() and hasattr(torch._C, node.value):
                yield f"torch._C.{node.value}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(owner, ast.Constant) and node.func.id == "Patch":
                yield f"{owner.value}.{name.value}"
            elif isinstance(name, ast.Constant) and node.func.id in ("getattr", "hasattr") and chain(owner):
                yield f"{chain(owner)}.{name.value}"


@cache
def trees() -> list[ast.Module]:
    paths = sorted((ROOT / "replayfmt").rglob("*.py"))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@cache
def used() -> set[str]:
    """The dotted names that the package uses, up to a special method."""
    names = {name.partition(".__")[0] for tree in trees() for name in names_in(tree)}
    return {name for name in names if is_private(name)}


@cache
def attributes() -> tuple[set[str], set[str]]:
    """The private attributes that the package asks of objects, and those of them that it defines nowhere."""
    asked, defined = set(), set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else asked).add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            asked |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
    private = {name for name in asked if name.startswith("_") and not name.startswith("__") and name != "_"}
    return private, private - defined


def found(name: str) -> Any:
    """What a dotted name leads to in the installed PyTorch: a module, an attribute, or one of which methods speak."""
    at: Any = torch
    so_far = "torch"
    for part in name.split(".")[1:]:
        so_far += f".{part}"
        if not hasattr(at, part):
            with suppress(ImportError):
                import_module(so_far)
        methods = vars(at).values() if isinstance(at, type) else ()
        if any(part in each.__code__.co_names for each in methods if isinstance(each, FunctionType)):
            return at
        at = sys.modules.get(so_far, getattr(at, part, _MISSING))
    return at


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


@pytest.mark.slow
def test_every_private_name_that_the_package_uses_is_in_the_table() -> None:
    assert sorted(name for name in used() if not any(f"{row}.".startswith(f"{name}.") for row in NAMES)) == []
    last = {row.rpartition(".")[2] for row in NAMES}
    parts = {part for row in NAMES for part in row.split(".")}
    _asked, of_others = attributes()
    assert sorted(of_others - last - parts - _NOT_OF_PYTORCH) == []


@pytest.mark.slow
def test_every_name_of_the_table_is_used() -> None:
    names, (asked, _of_others) = used(), attributes()
    texts = {node.value for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert [row for row in NAMES if row not in names and row.rpartition(".")[2] not in asked | texts] == []


@pytest.mark.slow
def test_the_installed_version_has_the_names_that_the_table_says_it_has() -> None:
    version = version_of(torch.__version__)
    wrong = []
    for name, row in NAMES.items():
        expected = version_of(row.since) <= version and (not row.until or version < version_of(row.until))
        expected = expected and (not row.build or getattr(torch.version, row.build, None) is not None)
        exists = found(name) is not _MISSING
        if exists is not expected and (expected or row.build or version in map(version_of, LOOKED_AT)):
            wrong.append(f"{name}: {'there' if exists else 'not there'}, but {row}")
    assert not wrong


def test_of_each_name_that_not_every_version_has_the_table_says_what_is_lost_without_it() -> None:
    assert [name for name, row in NAMES.items() if (row != EVERYWHERE) != bool(row.lost)] == []
