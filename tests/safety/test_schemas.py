"""Schemas of a capture or a trace before PyTorch's parser: one place that calls it, and nothing that it chokes on."""

from __future__ import annotations

import ast
import json
import resource
from pathlib import Path

import pytest
import torch
from failure.table import recorded
from format.reseal import rename_kernel
from in_process import Tools

from replayfmt.errors import ReplayRefused
from replayfmt.importers.common.operators import Operators
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.replay.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = [
    "aten::exp(" + "(" * 1_000_000,
    "aten::exp(" + "Future(" * 50_000 + "Tensor" + ")" * 50_000 + " self) -> Tensor",
    "aten::exp(Tensor" + "[]" * 500_000 + " self) -> Tensor",
    "aten::exp(Tensor self) -> " + "(" * 30_000,
    "x" * 10_000_000,
    "",
    "aten::exp(__torch__.torch.classes.a.B self) -> Tensor",
    "\x00",
    "aten::exp)(Tensor self -> Tensor",
    "aten::exp(Tensor self, int[1000000000] x=1) -> Tensor",
    "aten::exp(Tensor self, int[ 1000000000 ] x=1) -> Tensor",
    "aten::exp(Tensor self, Tensor(a!)[999999999] x) -> Tensor",
    f"aten::exp(Tensor self, int[{'9' * 40}] x=1) -> Tensor",
    f"aten::exp(Tensor self, int x={'9' * 9000}) -> Tensor",
    "aten::exp(Tensor self, int x=99999999999999999999) -> Tensor",
    "aten::exp(Tensor self, float x=1e999) -> Tensor",
    "aten::exp(Tensor self, float x=1e99999999999999999999999) -> Tensor",
    "aten::exp(Tensor self) -> Tensor[1000000000]",
    "aten::exp(Tensor self, int[2][1000000000] x=1) -> Tensor",
]


@pytest.mark.guarantee("schemas")
@pytest.mark.slow
@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("payload", ["full", "none"])
def test_a_schema_cannot_end_the_process_nor_take_its_memory(tmp_path: Path, schema: str, payload: str) -> None:
    """PyTorch's parser recurses for every bracket, and makes lists as long as a schema says. Without content, a replay
    reads schemas in another place: to find out what integers are for."""
    weight, index = torch.ones(3), torch.arange(2)
    path = recorded(tmp_path, lambda: (torch.exp(weight), weight.index_select(0, index)), payload=payload)
    rename_kernel(path, "aten::exp", schema=schema)
    if payload == "none":
        rename_kernel(path, "aten::index_select", name="nowhere::index_select", schema=schema)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    assert any("its captured schema cannot be read" in finding for finding in refused.value.findings)
    with Plan(path, keep_going=True) as plan:
        plan.execute(keep_going=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
    found = Operators().by_schema(schema)
    assert found.operator is None and found.detail


@pytest.mark.guarantee("schemas")
def test_archives_of_other_tools_are_read_by_the_same_parser(tmp_path: Path, tools: Tools) -> None:
    for number, schema in enumerate(each for each in HOSTILE if len(each) < 2_000_000):
        entry = {
            "op_name": "aten::exp",
            "count": 1,
            "opreplay": {"overload": "default", "schema": schema},
            "replay_ir": {
                "list_pos_args": [
                    {
                        "arg_name": "self",
                        "arg_type": "Tensor",
                        "value": {"shape": [3], "dtype": "float", "strides": [1], "init": "normal"},
                    }
                ],
                "list_kwargs": [],
            },
        }
        trace = tmp_path / f"{number}.json"
        trace.write_text(json.dumps([entry]))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = tools("import", trace, "-o", tmp_path / f"{number}.opreplay")
        assert done.code in (0, 1, 3), done
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"


def test_what_is_no_number_of_a_schema_is_a_value_error() -> None:
    for schema in HOSTILE:
        with pytest.raises((ValueError, RuntimeError)):
            parse_schema(schema)


def test_every_schema_of_pytorchs_own_is_read() -> None:
    read = 0
    for text in map(str, torch._C._jit_get_all_schemas()):
        try:
            torch._C.parse_schema(text)
        except RuntimeError:
            continue  # PyTorch's own parser does not know PyObject, which operators of torch.distributed take
        parse_schema(text)
        read += 1
    assert read > 2000


@pytest.mark.guarantee("schemas")
@pytest.mark.slow
def test_nothing_else_calls_pytorchs_parsers() -> None:
    """What is defined in a library was read by the guarded parser before, or is an operator of our own."""
    guarded = "replayfmt/pytorch/overloads.py"
    allowed = {("parse_schema", guarded), ("define", guarded), ("define", "replayfmt/pytorch/collectives.py")}
    parsers = {
        "parse_schema",
        "parse_ir",
        "parse_type_comment",
        "define",
        "_jit_script_compile",
        "CompilationUnit",
        "import_ir_module",
        "import_ir_module_from_buffer",
        "infer_schema",
    }
    found = set()
    for path in [*(ROOT / "replayfmt").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in parsers:
                if any(own in ast.unparse(node) for own in ("variables", "_definitions")):
                    continue  # something else is defined there
                found.add((node.attr, str(path.relative_to(ROOT))))
    assert found == allowed
