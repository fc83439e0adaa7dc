"""Operators that traces call otherwise, and strings that they drop: the known tables, and the user's entries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from opreplay_tools.importer import cli

import replayfmt
from replayfmt.errors import UsageError
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.arguments import UNRECORDED, ArgumentReader, TensorSpec, of_tensor
from replayfmt.importers.common.operators import Operators
from replayfmt.importers.importing import import_trace
from replayfmt.pytorch import traced_names
from replayfmt.pytorch.traced_names import Guess, TracedNames, parse_op_alias, parse_string_default, parsed

from .traces import op, tensor, trace

T = tensor("float", 4)
DROPPED = ("", [], [], "")


@pytest.fixture
def engine() -> Iterator[None]:
    with (
        torch.library._scoped_library("names_engine", "FRAGMENT") as library,
        torch.library._scoped_library("_rocm_C", "FRAGMENT") as rocm,
    ):
        library.define("write(Tensor key, str kv_cache_dtype) -> Tensor")
        library.define("gather(Tensor key, str kv_cache_dtype='fp8') -> Tensor")
        library.define("scale(Tensor key, str how, str? unit) -> Tensor")
        rocm.define("wvSpltK(Tensor a, Tensor b) -> Tensor")
        for name in ("write", "gather", "scale"):
            library.impl(name, lambda key, *texts: key.clone(), "CompositeExplicitAutograd")
        rocm.impl("wvSpltK", lambda a, b: a @ b.t(), "CompositeExplicitAutograd")
        yield


@pytest.fixture(autouse=True)
def _registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_names, "_aliases", {})
    monkeypatch.setattr(traced_names, "_strings", {})


def strings(path: Path) -> dict[str, list[Any]]:
    """Arguments of each op of a capture that are no tensors, by operator."""
    with open_capture(path) as reader:
        return {
            reader.kernels[record.signature.kernel].name: [
                value for value in record.args if value is None or isinstance(value, str)
            ]
            for record in reader.records()
            if record.signature.kernel
        }


def invoke(source: Path, out: Path, *flags: str) -> Result:
    return CliRunner().invoke(cli, [str(source), "-o", str(out), "--level=leaf", *flags])


def test_a_cache_dtype_is_taken_by_the_arguments_name_and_warned_of(engine: None, tmp_path: Path) -> None:
    source = trace(
        tmp_path / "t.json",
        [
            op("names_engine::write", 0, 5, [T, DROPPED]),
            op("names_engine::write", 10, 5, [T, DROPPED]),
            op("names_engine::gather", 20, 5, [T, DROPPED]),
        ],
    )
    report = import_trace(source, tmp_path / "t.opreplay", level="leaf")
    assert report.calls()["inferred"] == 3
    assert strings(tmp_path / "t.opreplay") == {"names_engine::write": ["auto"], "names_engine::gather": []}
    (warning,) = report.warnings()
    assert warning == (
        "names_engine::write, 2 times: kv_cache_dtype='auto': the trace drops strings; the table of "
        "string defaults has this for arguments of that name"
    )
    assert next(report.rows())["warnings"] == [warning] and f"warning       {warning}" in report.lines()
    assert not any(line.startswith("assumed") and "'auto'" in line for line in report.lines()), "said once"


def test_the_users_string_comes_first_and_each_use_is_a_warning(engine: None, tmp_path: Path) -> None:
    source = trace(
        tmp_path / "t.json",
        [
            op("names_engine::write", 0, 5, [T, DROPPED]),
            op("names_engine::gather", 20, 5, [T, DROPPED]),
            op("names_engine::scale", 30, 5, [T, DROPPED, DROPPED]),
        ],
    )
    out = tmp_path / "t.opreplay"
    done = invoke(
        source,
        out,
        "--string-default=*.kv_cache_dtype=fp8_e5m2",
        "--string-default=names_engine::scale.how=x=y",
        "--string-default=names_engine::write.kv_cache_dtype=int8",
        "--string-default=aten::mm.how=z",
    )
    assert done.exit_code == 0, done.output
    assert strings(out)["names_engine::write"] == ["int8"] and strings(out)["names_engine::gather"] == ["fp8_e5m2"]
    assert "names_engine::scale" not in strings(out), "unit is still not known"
    warned = [line for line in done.stderr.splitlines() if ": warning: " in line]
    assert len(warned) == 3 and all(str(source) in line for line in warned)
    assert any("kv_cache_dtype='int8': the trace drops strings; as you said" in line for line in warned)
    assert any("--string-default aten::mm.how=z: no call lacks that string" in line for line in warned)
    done = invoke(source, out, "--force", "--string-default=*.how=x", "--string-default=*.unit=", "--format=jsonl")
    assert strings(out)["names_engine::scale"] == ["x", ""]
    assert len(json.loads(done.stdout.splitlines()[0])["warnings"]) == 3


def test_a_library_that_changed_a_spelling_is_met_under_both(engine: None, tmp_path: Path) -> None:
    source = trace(
        tmp_path / "t.json",
        [
            op("_rocm_C::wvSplitK", 0, 5, [tensor("float", 2, 4), tensor("float", 3, 4)]),
            op("_rocm_C::wvSpltK", 9, 5, [tensor("float", 2, 4), tensor("float", 3, 4)]),
        ],
    )
    report = import_trace(source, tmp_path / "t.opreplay", level="leaf")
    assert report.calls() == {"exact": 1, "inferred": 1, "incomplete": 0}
    (warning,) = report.warnings()
    assert "_rocm_C::wvSplitK is _rocm_C::wvSpltK, by the table of aliases" in warning
    operators = Operators()
    assert operators.candidates("_rocm_C::wvSpltK")[0][0].name == "_rocm_C::wvSpltK"
    assert "names_engine::missing" in operators.candidates("names_engine::missing")[1]


def test_an_alias_of_the_user_is_taken_and_warned_of(engine: None, tmp_path: Path) -> None:
    source = trace(
        tmp_path / "t.json", [op("my kernel", 0, 5, [T]), op("other::relu", 10, 5, [T]), op("aten::exp", 20, 5, [T])]
    )
    out = tmp_path / "t.opreplay"
    done = invoke(
        source,
        out,
        "--op-alias=my kernel=aten::relu",
        "--op-alias=other::relu=aten::relu",
        "--op-alias=nobody=aten::mm",
        "--op-alias=aten::exp=aten::sin",
    )
    assert done.exit_code == 0, done.output
    assert set(strings(out)) == {"aten::relu", "aten::sin"}
    assert "my kernel, 1 time: my kernel is aten::relu, as you said" in done.stderr
    assert "--op-alias nobody=aten::mm: nothing in the trace has that name" in done.stderr
    assert done.stderr.count("warning:") == 4


def test_aliases_work_in_ir_that_names_its_arguments(tmp_path: Path) -> None:
    item = {"arg_name": "self", "arg_type": "Tensor", "value": {"shape": [2], "dtype": "float", "strides": [1]}}
    source = tmp_path / "event_replay_ir.json"
    source.write_text(json.dumps([{"op_name": "old::relu", "replay_ir": {"list_pos_args": [item], "list_kwargs": []}}]))
    report = import_trace(source, tmp_path / "t.opreplay", names=TracedNames({"old::relu": "aten::relu"}))
    assert report.calls()["inferred"] == 1 and "old::relu is aten::relu, as you said" in report.warnings()[0]


def test_names_registered_from_python_are_there_in_every_import(engine: None, tmp_path: Path) -> None:
    replayfmt.register_op_alias("other::relu", "aten::relu")
    replayfmt.register_string_default("*", "how", "twice")
    replayfmt.register_string_default("names_engine::scale", "unit", "m")
    source = trace(
        tmp_path / "t.json", [op("other::relu", 0, 5, [T]), op("names_engine::scale", 10, 5, [T, DROPPED, DROPPED])]
    )
    report = import_trace(source, tmp_path / "t.opreplay", level="leaf")
    assert strings(tmp_path / "t.opreplay") == {"aten::relu": [], "names_engine::scale": ["twice", "m"]}
    assert len(report.warnings()) == 3
    assert TracedNames({"other::relu": "aten::exp"}).meant("other::relu") == ("aten::exp",), "the call's own come first"


def test_autograds_names_without_a_namespace_are_no_guess() -> None:
    names = TracedNames()
    assert not isinstance(names.alias_sentence("detach", "aten::detach"), Guess)
    assert isinstance(names.alias_sentence("FlashAttnFunc", "flash_attn::_flash_attn_forward"), Guess)


def test_only_strings_take_string_defaults() -> None:
    names = TracedNames(string_defaults={("*", "dim"): "1", ("*", "self"): "x"})
    recorded = [of_tensor(TensorSpec(None, (2,))), UNRECORDED, UNRECORDED]
    binding = ArgumentReader(names).bind(torch.ops.aten.sum.dim_IntList._schema, recorded)
    assert not any(isinstance(sentence, Guess) for sentence in binding.assumed)
    assert len(names.unused()) == 2


@pytest.mark.parametrize("text", ["", "a", "=aten::mm", "aten::mm=aten::mm", "x=mm", "x=aten::", "x=aten::mm.out"])
def test_what_is_no_alias_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--op-alias="):
        parse_op_alias(text)


@pytest.mark.parametrize(
    "text", ["", "a", "aten::div=floor", "div.rounding_mode=floor", "aten::div.=x", ".mode=x", "*=x", "aten::a b.c=d"]
)
def test_what_is_no_string_default_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--string-default="):
        parse_string_default(text)


def test_two_answers_to_one_question_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"--string-default: \*\.a is given twice, as 'b' and as 'c'"):
        parsed(string_defaults=["*.a=b", "*.a=c"])
    with pytest.raises(UsageError, match="--op-alias: x is given twice"):
        parsed(aliases=["x=aten::mm", "x=aten::bmm"])
    parsed(aliases=["x=aten::mm", "x=aten::mm"])
