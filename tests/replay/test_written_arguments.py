"""Operators that write arguments in every way a schema can say it, through captures, replays, skeletons and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.export.replay_zip import export_replay_zip
from replayfmt.format.operator_schema import canonical_schema, parse_operator_schema
from replayfmt.format.reader import open_capture
from replayfmt.importers.tracelens import import_tracelens
from replayfmt.pytorch.overloads import parse_schema, printed_schema

SCHEMAS = {
    "one": "(Tensor! out, Tensor x) -> ()",
    "perhaps": "(Tensor!? out, Tensor x) -> ()",
    "several": "(Tensor![] outs, Tensor x) -> ()",
    "several_perhaps": "(Tensor(a!)?[] outs, Tensor x) -> ()",
    "no_list": "(Tensor![]? outs, Tensor x) -> ()",
    "named": "(Tensor(a!)? out, Tensor x, Tensor(b!)[] outs) -> ()",
    "reads": "(Tensor x, str mark='($0! -> )') -> Tensor",
}


def _write(*arguments: Any) -> None:
    x = next(each for each in arguments if isinstance(each, torch.Tensor) and bool((each != 0).any()))
    for each in arguments:
        for target in each if isinstance(each, list) else [each]:
            if target is not None and target is not x:
                target.copy_(x)


@pytest.fixture
def operators() -> Iterator[Any]:
    with torch.library._scoped_library("written", "FRAGMENT") as library:
        for name, schema in SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, torch.exp if name == "reads" else _write, "CPU")
        yield torch.ops.written


@pytest.fixture
def capture(operators: Any, tmp_path: Path) -> Path:
    x = torch.arange(1.0, 4.0)
    outs = [torch.zeros(3) for _ in range(9)]
    with replayfmt.capture(tmp_path / "written.opreplay"):
        operators.one(outs[0], x)
        operators.perhaps(outs[1], x)
        operators.several(outs[2:4], x)
        operators.several_perhaps([outs[4], None], x)
        operators.no_list([outs[5]], x)
        operators.named(outs[6], x, outs[7:9])
        operators.reads(sum(outs))
    return tmp_path / "written.opreplay"


def test_what_such_operators_write_is_captured_and_replayed(capture: Path) -> None:
    with replayfmt.Plan(capture) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
        assert plan.execute(verify="bitwise").outcome == "ok", "the written tensors are fresh in every run"


def test_no_form_of_writing_leaks_as_text_that_nothing_reads(capture: Path) -> None:
    with open_capture(capture) as reader:
        kernels = [each for each in reader.kernels if each is not None and each.name.startswith("written::")]
    assert len(kernels) == len(SCHEMAS)
    for kernel in kernels:
        base = kernel.name.partition("::")[2]
        written = [
            argument.name for argument in parse_operator_schema(kernel.schema).arguments if argument.type.written
        ]
        assert written == [
            argument.name
            for argument in getattr(torch.ops.written, base).default._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        assert parse_schema(kernel.schema) == getattr(torch.ops.written, base).default._schema
        assert torch._C.parse_schema(kernel.schema), "PyTorch reads it as it stands"
        assert ("$" in kernel.schema) == (base == "reads"), "a default's text stays as it is"


def test_a_skeleton_says_what_has_to_be_written(capture: Path) -> None:
    said = {}
    with open_capture(capture) as reader:
        for number in range(1, len(reader.kernels)):
            text = kernel_skeleton(reader, number)
            kernel = reader.kernels[number]
            assert kernel is not None
            if kernel.name.startswith("written::"):
                said[kernel.name.partition("::")[2]] = next(
                    line.strip() for line in text.splitlines() if "write" in line and line.startswith("    It ")
                )
                compile(text, "skeleton", "exec")
    assert said.pop("reads") == "It must not write its arguments."
    assert said.pop("named") == "It must write out, outs, and no other argument."
    assert set(said.values()) == {
        "It must write out, and no other argument.",
        "It must write outs, and no other argument.",
    }


def test_such_operators_are_exported_and_imported_back(capture: Path, tmp_path: Path) -> None:
    with open_capture(capture) as reader:
        export_replay_zip(reader, tmp_path / "written.zip")
    report = import_tracelens(tmp_path / "written.zip", tmp_path / "back.opreplay")
    assert report.calls()["inferred"] == report.calls()["incomplete"] == 0
    with open_capture(capture) as before, open_capture(tmp_path / "back.opreplay") as after:
        ours, theirs = ({each.schema for each in reader.kernels if each is not None} for reader in (before, after))
        assert ours == theirs


def _printable(*parts: str) -> torch.FunctionSchema | None:
    try:
        return torch._C.parse_schema("x::f({}{} x, Tensor! y) -> {}".format(*parts))
    except RuntimeError:
        return None  # PyTorch has no such type


@pytest.mark.parametrize("reads", [torch._C.parse_schema, parse_schema], ids=["pytorch", "ours"])
def test_every_form_that_pytorch_prints_can_be_read_again(reads: Callable[[str], torch.FunctionSchema]) -> None:
    names = ["", "!", "(a!)", "(a)", "(a|b)", "(a! -> b|c)", "(a -> *)", "(a!)[](b!)"]
    kinds = ["", "?", "[]", "[]?", "?[]", "?[]?", "[2]", "[][]", "[]?[]"]
    schemas = {
        text: schema
        for text in product(names, kinds, ["()", "Tensor!", "(Tensor(a!), Tensor![])"])
        if (schema := _printable(f"Tensor{text[0]}", text[1], text[2])) is not None
    }
    assert len(schemas) > 150
    for schema in schemas.values():
        again = reads(printed_schema(schema))
        assert [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments] == [
            each.alias_info is not None and each.alias_info.is_write for each in again.arguments
        ]
        assert [str(each.type) for each in again.arguments] == [str(each.type) for each in schema.arguments]
        assert printed_schema(again) == printed_schema(schema) == canonical_schema(printed_schema(schema))
        assert parse_schema(str(schema)).arguments[0].name == "x", "captures and traces have what PyTorch printed"


def test_every_schema_of_this_torch_reads_back_as_it_is() -> None:
    schemas = torch._C._jit_get_all_schemas()
    assert len(schemas) > 2000
    for schema in schemas:
        # PyTorch prints some of TorchScript's schemas, and types of its own, as nothing that it reads.
        if schema.name.startswith(("aten::", "prims::", "quantized::")) and "..." not in str(schema):
            assert parse_schema(printed_schema(schema)) == schema, str(schema)


def test_hostile_schema_text_takes_no_time() -> None:
    for text in ('"' + '\\"' * 100_000, "a" * 100_000, "a|" * 100_000, "?(" * 100_000, "($1" * 100_000, '"' * 100_001):
        canonical_schema(text)  # quadratic would take minutes
