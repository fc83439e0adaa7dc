"""The import direction, read off every module's source, and the modules that must work where torch is not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# errors ← format ← native ← pytorch ← {recording, importers, initializers ← replay} ← {benchmark, trim,
# probing} ← compare
# ← report ← export ← api, tools; dump stands on format and native alone, probes on format.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "collector": set(),
    "version": set(),
    "format": {"errors"},
    "dump": {"errors", "format", "native"},
    "native": {"errors", "format"},
    "probes": {"errors", "format"},
    "pytorch": {"errors", "version", "format", "native"},
    "recording": {"errors", "collector", "format", "pytorch", "native"},
    "importers": {"errors", "collector", "format", "pytorch"},
    "initializers": {"errors", "format", "pytorch"},
    "replay": {"errors", "collector", "format", "pytorch", "initializers"},
    "probing": {"errors", "format", "probes", "pytorch", "replay"},
    "benchmark": {
        "errors",
        "collector",
        "version",
        "format",
        "pytorch",
        "recording",
        "importers",
        "initializers",
        "replay",
    },
    "compare": {"errors", "collector", "format", "dump", "pytorch", "initializers", "replay", "benchmark", "trim"},
    "trim": {"errors", "format", "dump", "pytorch", "recording", "initializers", "replay"},
    "export": {
        "errors",
        "format",
        "pytorch",
        "importers",
        "initializers",
        "replay",
        "dump",
        "trim",
        "benchmark",
        "report",
    },
    "report": {"errors", "format", "importers", "dump", "benchmark", "probes", "compare"},
    "api": {"errors", "format", "pytorch", "recording", "initializers", "replay", "benchmark", "dump", "export"},
}
WITHOUT_TORCH = (
    "replayfmt/errors.py",
    "replayfmt/version.py",
    "replayfmt/format",
    "replayfmt/dump",
    "replayfmt/probes",
    *(
        f"replayfmt/compare/{name}.py"
        for name in ("trace", "alignment", "structure", "divergence", "distances", "results")
    ),
    "replayfmt/pytorch/operators.py",
    "replayfmt/export/tables.py",
    "tools/__init__.py",
    "tools/command.py",
    "tools/__main__.py",
    "tools/dump.py",
    "tools/check.py",
    "tools/probe.py",
    *(f"replayfmt/trim/{name}.py" for name in ("schedule", "copying", "writing")),
)
TOP_LEVEL = {"__init__", "__main__", "api"}  # the package's own face: may use every part


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for top in ("replayfmt", "tools") for path in (ROOT / top).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that `path` names in an import, at any depth of its code, with the line it does so."""
    name = ".".join(path.with_suffix("").parts)
    package = name.removesuffix(".__init__") if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from replayfmt import errors` names the module replayfmt.errors: say both.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def part_of(module: str) -> str | None:
    """`format` for replayfmt.format.reader; None for what is not this library's or is the library's own face."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[0] == "replayfmt" and names[1] in ALLOWED else None


def test_every_part_is_known_to_the_import_rule() -> None:
    parts = {path.parts[1].removesuffix(".py") for path in modules() if path.parts[0] == "replayfmt"}
    assert parts - TOP_LEVEL <= set(ALLOWED)


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(set(ALLOWED) - TOP_LEVEL))
def test_a_part_imports_only_the_parts_before_it(part: str) -> None:
    wrong = []
    for path in modules():
        if path.parts[0] != "replayfmt" or path.parts[1].removesuffix(".py") != part:
            continue
        for line, module in imported(path):
            if module.startswith("replayfmt") and part_of(module) not in ALLOWED[part] | {part}:
                wrong.append(f"{path}:{line} imports {module}")
            if module.split(".")[0] in {"tools", "opreplay_tools"}:
                wrong.append(f"{path}:{line} imports {module}: the library does not know its tools")
    assert not wrong


def _edges() -> dict[str, set[str]]:
    """Which modules of the library each one names in an import, wherever in its code and be it for types alone."""
    names = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
        if path.parts[0] == "replayfmt"
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        # An import of a module's name comes as `module.name`, one of a module as itself.
        targets = {module if module in names else module.rpartition(".")[0] for _line, module in imported(path)}
        found[name] = (targets & set(names)) - {name}
    return found


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules in which each needs all others: what is left when every module is taken away that needs
    none of the rest, or that none of the rest needs."""
    left = {name: set(targets) for name, targets in edges.items()}
    while True:
        needed = set().union(*left.values()) if left else set()
        gone = {name for name, targets in left.items() if not targets & set(left) or name not in needed}
        if not gone:
            break
        left = {name: targets - gone for name, targets in left.items() if name not in gone}
    groups: list[set[str]] = []
    for name, targets in left.items():
        touching = [group for group in groups if group & (targets | {name})]
        groups = [group for group in groups if group not in touching]
        groups.append(set().union({name}, targets, *touching))
    return groups


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles(_edges())


@pytest.mark.slow
def test_the_folders_and_modules_of_a_package_have_an_order() -> None:
    """In every package, folders and the modules that stand beside them import each other in one direction only."""
    edges = _edges()
    for package in {name.rpartition(".")[0] for name in edges}:
        children: dict[str, set[str]] = {}
        for name, targets in edges.items():
            child = _child(name, package)
            if child:
                children.setdefault(child, set()).update({_child(each, package) for each in targets} - {"", child})
        assert not circles(children), package


def _child(module: str, package: str) -> str:
    """The folder or module of `package` that a module is or is in; "" for those outside."""
    inside = module.removeprefix(f"{package}.")
    return "" if inside == module else inside.partition(".")[0]


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}) == [{"b", "c"}]


@pytest.mark.slow
def test_nothing_that_must_work_without_torch_names_it() -> None:
    wrong = [
        f"{path}:{line}"
        for path in modules()
        if str(path).startswith(WITHOUT_TORCH)
        for line, module in imported(path)
        if module.split(".")[0] == "torch"
        or part_of(module) in {"pytorch", "recording", "initializers", "replay", "benchmark"}
        if not module.startswith("replayfmt.pytorch.operators")  # a table, listed above
    ]
    assert not wrong


@pytest.mark.slow
def test_a_replay_knows_operators_by_its_kernels_alone() -> None:
    """Whatever else is to be replayed is another kind of kernel, not another case in every module. (Replacements may be
    operators themselves.)"""
    knows = {
        Path("replayfmt/replay") / name
        for name in ("planning/kernels.py", "resolution/kernel_lookup.py", "substitution/loading.py")
    }
    wrong = []
    for path in modules():
        if path.parts[1] not in ("replay", "benchmark", "export") or path in knows:
            continue
        wrong += [
            f"{path}:{line}"
            for line, module in imported(path)
            if module.split(".")[-1]
            in ("OpOverload", "OpOverloadPacket", "OperatorKernel", "find_overload", "direct_function")
        ]
        wrong += [
            f"{path}:{node.lineno}"
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr in ("_schema", "OpOverload")
            and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        ]
    assert not wrong


@pytest.mark.guarantee("no-pickle")
@pytest.mark.slow
def test_nothing_imports_pickle() -> None:
    wrong = [
        f"{path}:{line}"
        for path in modules()
        for line, module in imported(path)
        if module.split(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    ]
    assert not wrong


@pytest.mark.slow
def test_format_dump_and_check_import_where_torch_is_not_installed() -> None:
    code = """
import sys, pkgutil, importlib
sys.modules["torch"] = None  # importing it raises ImportError
import replayfmt, replayfmt.format, replayfmt.dump, replayfmt.probes
for package in (replayfmt.format, replayfmt.dump, replayfmt.probes):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for tool in ("command", "dump", "check", "probe"):
    importlib.import_module("opreplay_tools." + tool)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_mistake_against_the_rule_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "replayfmt/format").mkdir(parents=True)
    wrong = Path("replayfmt/format/reader.py")
    (tmp_path / wrong).write_text("def f():\n    from ..replay import plan\n    import torch.nn\n")
    assert set(imported(wrong)) == {(2, "replayfmt.replay.plan"), (3, "torch.nn")}
