"""All that is known of operators beside their schemas is in one table, and the table is right about this torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.pytorch import operators
from replayfmt.pytorch.operators import COLLECTIVES, COMPUTING, opaque_results, operator_named
from replayfmt.pytorch.overloads import find_overload, overloads_of
from replayfmt.replay.plan import Plan

ROOT = Path(__file__).parents[2]
NAMESPACES = COMPUTING | COLLECTIVES | {"prim", "static_runtime", "profiler"}
# Modes see them, although the dispatcher does not have them, or not in every version.
NOT_DISPATCHED = {"device", "dim", "is_contiguous", "layout", "numel"}
# Whose modules `import torch` leaves out.
LATER = {"fsdp", "quantized_decomposed"}


def _all_names() -> list[str]:
    return sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()})


def _named(value: object) -> set[str]:
    """The names in one of the table's collections."""
    if isinstance(value, frozenset | set | dict):
        return {name for name in value if isinstance(name, str)}
    return set()


@pytest.mark.slow
def test_no_other_module_lists_namespaces_of_pytorch() -> None:
    wrong = []
    for path in sorted((ROOT / "replayfmt").rglob("*.py")):
        if path.name in ("operators.py", "op_libraries.py") and path.parent.name == "pytorch":
            continue  # op_libraries: which module registers them
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Set | ast.Tuple | ast.List):
                texts = {
                    each.value.rstrip(":")
                    for each in node.elts
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
                if len(texts & NAMESPACES) > 1:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {sorted(texts & NAMESPACES)}")
    assert not wrong


def test_every_operator_in_the_table_is_one_of_this_torch() -> None:
    listed = {
        name: value
        for name, value in vars(operators).items()
        if name.startswith("_") and name.isupper() and _named(value)
    }
    here = set(_all_names())
    missing = []
    for table, value in listed.items():
        if table in ("_ACTING_NAMESPACES", "_IN_PARTS", "_LIKE_ATEN"):
            continue
        for name in _named(value):
            base = name.partition(".")[0]
            full = [base] if "::" in base else [f"{namespace}::{base}" for namespace in ("aten", "inductor", "prim")]
            if base.startswith("_C::") or base in NOT_DISPATCHED or base.partition("::")[0] in LATER:
                continue
            if not here & set(full):
                missing.append(f"{table}: {name}")
    assert not missing


@pytest.mark.slow
def test_arguments_that_the_table_names_are_arguments() -> None:
    for name in _all_names():
        for overload in overloads_of(name):
            of = operator_named(name, overload._schema.overload_name or "default")
            names = {argument.name for argument in overload._schema.arguments}
            for pair in (of.only_with, of.unread_with):
                assert pair is None or set(pair) <= names, name
            read = of.read_for_result
            assert {*read, *(flags for flags, _place in read.values())} <= names, name
            assert set(of.unread) <= names, name
            assert set(of.quiet_writes) <= names, name
            assert all(index < len(overload._schema.returns) for index in opaque_results(name)), name


def test_every_operator_that_updates_running_statistics_is_known_to_write_them() -> None:
    """Their schemas do not say so. Those that only read them say that in their names."""
    only_read = ("backward", "functional", "no_training", "no_update")
    quiet = []
    for name in _all_names():
        for overload in overloads_of(name) if name.startswith("aten::") else ():
            arguments = {argument.name: argument for argument in overload._schema.arguments}
            running = arguments.get("running_mean")
            if running is None or running.alias_info is not None or any(part in name for part in only_read):
                continue
            if "running_mean" not in operator_named(name).quiet_writes:
                quiet.append(str(overload))
    assert not quiet


def test_own_operators_whose_names_say_that_they_write_in_place_declare_it() -> None:
    """The schemas of those that the table calls PyTorch's own are believed."""
    silent = []
    for name in _all_names():
        if not operator_named(name).own or not name.endswith("_") or name.endswith("__") or operator_named(name).idle:
            continue
        for overload in overloads_of(name):
            aliases = [each.alias_info for each in overload._schema.arguments]
            if not any(alias is not None and alias.is_write for alias in aliases):
                silent.append(str(overload))
    assert not silent


@pytest.mark.slow
def test_statistics_that_an_operator_updates_unsaid_are_restored_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "statistics.opreplay"
    mean, variance, batch = torch.zeros(3), torch.ones(3), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    with replayfmt.capture(path, digests="ops"):
        for _step in range(2):
            torch.batch_norm_update_stats(batch, mean, variance, 0.1)
        total = mean.add(1).sum().item()
    assert total != 3
    with Plan(path) as plan:
        for _run in range(2):
            result = plan.execute(verify="bitwise")
            assert result.divergence is None and result.outcome == "ok", result


@pytest.mark.parametrize(("name", "overload"), [("aten::rrelu_with_noise", "default"), ("aten::bernoulli", "p")])
def test_what_is_known_of_one_overload_is_known_by_its_name(name: str, overload: str) -> None:
    assert find_overload(name, overload) is not None
    assert operator_named(name, overload).unread
