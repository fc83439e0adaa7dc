"""Overloads by recorded types, and arguments by the overload's schema."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.importers.common.arguments import (
    HIDDEN_LIST,
    HIDDEN_NUMBER,
    NOTHING,
    UNRECORDED,
    ArgumentForm,
    ArgumentReader,
    Binding,
    DefaultGenerator,
    DeviceName,
    RecordedArgument,
    TensorSpec,
    number,
    of_list,
    of_tensor,
    of_value,
    parse,
    schema_type,
)
from replayfmt.importers.common.operators import Operators

T = of_tensor(TensorSpec(DType.float32, (4, 4), (4, 1)))
ZERO_DIM = of_tensor(TensorSpec(DType.float64, (), ()))
OPERATORS = Operators()


def bind(overload: Any, *recorded: RecordedArgument) -> Binding:
    return ArgumentReader().bind(overload._schema, recorded)


@pytest.mark.parametrize(
    ("name", "recorded", "overload"),
    [
        ("aten::add", [T, T, parse("1")], "Tensor"),
        ("aten::add", [T, parse("2.5"), parse("1")], "Scalar"),
        ("aten::add", [T, T, parse("1"), T], "out"),
        ("aten::mul", [T, ZERO_DIM], "Tensor"),
        ("aten::mul", [T, parse("2")], "Scalar"),
        ("aten::to", [T, parse("6"), parse("False"), parse("False"), UNRECORDED], "dtype"),
        ("aten::to", [T, UNRECORDED, parse("6"), parse("False"), parse("False"), UNRECORDED], "device"),
        (
            "aten::to",
            [T, parse("6"), parse("0"), UNRECORDED, UNRECORDED, parse("False"), parse("False"), UNRECORDED],
            "dtype_layout",
        ),
        ("aten::sum", [T, UNRECORDED], "default"),
        ("aten::sum", [T, parse("[0]"), parse("True"), UNRECORDED], "dim_IntList"),
        ("aten::mean", [T, parse("[-1]"), parse("True"), UNRECORDED], "dim"),
        (
            "aten::empty",
            [parse("[2, 3]"), parse("6"), parse("0"), UNRECORDED, parse("False"), UNRECORDED],
            "memory_format",
        ),
        ("aten::arange", [parse("5"), UNRECORDED, UNRECORDED, UNRECORDED, parse("False")], "default"),
        ("aten::arange", [parse("0"), parse("5"), UNRECORDED, UNRECORDED, UNRECORDED, parse("False")], "start"),
        (
            "aten::arange",
            [parse("0"), parse("5"), parse("2"), UNRECORDED, UNRECORDED, UNRECORDED, parse("False")],
            "start_step",
        ),
        ("aten::fill_", [T, parse("1")], "Scalar"),
        ("aten::fill_", [T, ZERO_DIM], "Tensor"),
        ("aten::eq", [T, parse("0")], "Scalar"),
        ("aten::max", [T], "default"),
        ("aten::max", [T, parse("1"), parse("False")], "dim"),
        ("aten::transpose", [T, parse("0"), parse("1")], "int"),
        ("aten::split", [T, parse("2"), parse("0")], "Tensor"),
        ("aten::split", [T, parse("[2, 2]"), parse("0")], "sizes"),
        ("aten::slice", [T, parse("0"), parse("0"), parse("9223372036854775807"), parse("1")], "Tensor"),
        ("aten::pow", [T, parse("2")], "Tensor_Scalar"),
        ("aten::pow", [parse("2"), T], "Scalar"),
        ("aten::div", [T, T, UNRECORDED], "Tensor_mode"),
        ("aten::conv2d", [T, T, NOTHING, parse("[1, 1]"), parse("[0, 0]"), parse("[1, 1]"), parse("1")], "default"),
        ("aten::cat", [of_list([T, T]), parse("0")], "default"),
        ("aten::where", [T, T, T], "self"),
        ("aten::clamp", [T, parse("0"), UNRECORDED], "default"),
        ("aten::full", [parse("[2]"), parse("1.5"), UNRECORDED, UNRECORDED, UNRECORDED, parse("False")], "default"),
        ("aten::_foreach_add_", [of_list([T, T]), of_list([T, T]), parse("-0.5")], "List"),
        ("aten::_foreach_add_", [of_list([T, T]), parse("1")], "Scalar"),
        ("aten::_foreach_add_", [of_list([T, T]), parse("[1, 2]")], "ScalarList"),
    ],
)
def test_the_overload_is_the_one_whose_schema_fits(
    name: str, recorded: Sequence[RecordedArgument], overload: str
) -> None:
    choice = OPERATORS.choose(name, recorded)
    assert choice.operator is not None, choice.detail
    assert choice.operator.overload == overload
    assert choice.operator.found == "the JIT registry"


def test_no_overload_that_fits_is_told_with_what_was_recorded_and_what_there_is() -> None:
    choice = OPERATORS.choose("aten::mm", [T, parse("2")])
    assert choice.operator is None and choice.reason == "import_incomplete"
    assert "(Tensor float32[4, 4], 2)" in choice.detail and "aten::mm(Tensor self" in choice.detail


def test_overloads_that_fit_equally_well_are_told_apart_in_a_note() -> None:
    # Without the values of numbers, nothing tells the overloads that take a number from each other.
    choice = OPERATORS.choose("aten::clamp_min", [T, T])
    assert choice.operator is not None and choice.operator.overload == "Tensor" and not choice.assumed
    ambiguous = OPERATORS.choose("aten::bernoulli_", [T, UNRECORDED, UNRECORDED])
    assert ambiguous.operator is not None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("9223372036854775807", 2**63 - 1),
        ("0.", 0.0),
        ("0.90000000000000002", 0.9),
        ("1e-05", 1e-5),
        ("True", True),
        ("False", False),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("(1,2.5)", 1 + 2.5j),
        ("1.5+2j", 1.5 + 2j),
        ("1.f", 1.0),
        ("", None),
        ("sum", None),
        ("1.2.3", None),
    ],
)
def test_numbers_keep_their_kind(text: str, value: Any) -> None:
    assert number(text) == value and type(number(text)) is type(value)


def test_values_are_parsed_as_far_as_they_are_there() -> None:
    assert parse("[1, 2.5, [True, None]]").items[1].value == 2.5
    assert parse("[]").form is ArgumentForm.items and parse("[]").items == ()
    assert parse("None") is NOTHING and parse("<None>") is NOTHING
    assert parse("[1, 2, ...]").form is ArgumentForm.truncated and parse("...").form is ArgumentForm.truncated
    assert parse("mean").form is ArgumentForm.text
    assert of_value([1, None, "a", [2.0]]).items[3].items[0].value == 2.0


def test_numbers_become_the_enumerations_that_the_schema_asks_for() -> None:
    binding = bind(
        torch.ops.aten.empty.memory_format,
        parse("[2, 3]"),
        parse("15"),
        parse("0"),
        parse("cuda:1"),
        parse("False"),
        parse("2"),
    )
    assert dict(binding.arguments) == {
        "size": [2, 3],
        "dtype": DType.bfloat16,
        "layout": Layout.strided,
        "device": DeviceName("cuda:1"),
        "pin_memory": False,
        "memory_format": MemoryFormat.channels_last,
    }
    assert not binding.assumed and not binding.missing


def test_names_become_enumerations_as_well() -> None:
    binding = bind(
        torch.ops.aten.empty.memory_format,
        parse("[2]"),
        parse("torch.float16"),
        parse("torch.strided"),
        UNRECORDED,
        NOTHING,
        parse("torch.contiguous_format"),
    )
    assert dict(binding.arguments) == {
        "size": [2],
        "dtype": DType.float16,
        "layout": Layout.strided,
        "device": DeviceName(None),
        "pin_memory": None,
        "memory_format": MemoryFormat.contiguous_format,
    }


def test_integer_scalars_stay_integers_and_floats_become_what_the_schema_has() -> None:
    binding = bind(torch.ops.aten.add.Tensor, T, T, parse("2"))
    assert dict(binding.arguments)["alpha"] == 2 and type(dict(binding.arguments)["alpha"]) is int
    binding = bind(torch.ops.aten.native_layer_norm.default, T, parse("[4]"), T, T, parse("1"))
    assert type(dict(binding.arguments)["eps"]) is float


def test_generators_are_the_default_one_and_noted() -> None:
    binding = bind(torch.ops.aten.normal_.default, T, parse("0."), parse("1."), UNRECORDED)
    assert dict(binding.arguments)["generator"] is None
    assert "default one" in binding.assumed[0]
    explicit = bind(torch.ops.aten.normal_.default, T, parse("0."), parse("1."), parse("<torch.Generator>"))
    assert dict(explicit.arguments)["generator"] == DefaultGenerator()


def test_strings_that_traces_drop_take_the_schemas_default_or_the_tables_with_a_note() -> None:
    binding = bind(torch.ops.aten.gelu.default, T, UNRECORDED)
    assert [name for name, _value in binding.arguments] == ["self"]
    assert "approximate='none'" in binding.assumed[0] and "schema's default" in binding.assumed[0]
    binding = bind(torch.ops.aten.div.Tensor_mode, T, T, UNRECORDED)
    assert dict(binding.arguments)["rounding_mode"] == "floor" and "table" in binding.assumed[0]
    binding = bind(torch.ops.aten.conv2d.padding, T, T, T, parse("[1, 1]"), UNRECORDED, parse("[1, 1]"), parse("1"))
    assert binding.assumed == ["padding='valid': the trace drops strings; the schema's default"]
    binding = bind(torch.ops.aten.linalg_norm.ord_str, T, UNRECORDED, NOTHING, parse("False"), NOTHING)
    assert not binding.assumed and "ord" in binding.missing[0]


def test_arguments_that_an_older_torch_did_not_have_are_left_to_their_defaults() -> None:
    binding = bind(torch.ops.aten.linear.default, T, T)
    assert [name for name, _value in binding.arguments] == ["input", "weight"]
    assert binding.assumed == ["bias=None: the trace does not have it; the schema's default"]


def test_what_is_truncated_missing_or_wrong_is_named() -> None:
    assert "holds only a part" in bind(torch.ops.aten.view.default, T, parse("[1, 2, ...]")).missing[0]
    assert "indices" in bind(torch.ops.aten.index.Tensor, T, UNRECORDED).missing[0]
    assert (
        "sizes are not recorded"
        in bind(torch.ops.aten.relu.default, of_tensor(TensorSpec(DType.float32, None))).missing[0]
    )
    assert "dtype is not recorded" in bind(torch.ops.aten.relu.default, of_tensor(TensorSpec(None, (2,)))).missing[0]
    assert "expected int" in bind(torch.ops.aten.softmax.int, T, parse("0.5"), NOTHING).missing[0]


def test_hidden_numbers_are_left_to_defaults_or_missing() -> None:
    assert OPERATORS.choose("aten::transpose", [T, HIDDEN_NUMBER, HIDDEN_NUMBER]).operator is not None
    assert len(bind(torch.ops.aten.transpose.int, T, HIDDEN_NUMBER, HIDDEN_NUMBER).missing) == 2
    binding = bind(torch.ops.aten.add.Tensor, T, T, HIDDEN_NUMBER)
    assert binding.assumed == ["alpha=1: the trace does not record the values of numbers; the schema's default"]
    assert bind(torch.ops.aten.view.default, T, HIDDEN_LIST).missing


def test_one_number_stands_for_a_list_of_fixed_length() -> None:
    binding = bind(
        torch.ops.aten.max_pool2d.default, T, parse("3"), parse("[2, 2]"), parse("0"), parse("1"), parse("False")
    )
    assert dict(binding.arguments)["kernel_size"] == [3, 3]


def test_optional_lists_of_optional_tensors_are_read() -> None:
    indices = of_list([NOTHING, of_tensor(TensorSpec(DType.int64, (3,), (1,)))])
    binding = bind(torch.ops.aten.index.Tensor, T, indices)
    assert dict(binding.arguments)["indices"] == [None, TensorSpec(DType.int64, (3,), (1,))]


@pytest.mark.parametrize(
    ("overload", "argument", "text"),
    [
        (torch.ops.aten.index.Tensor, 1, "Tensor?[]"),
        (torch.ops.aten.upsample_nearest2d.vec, 2, "float[]?"),
        (torch.ops.aten.empty.memory_format, 1, "ScalarType?"),
        (torch.ops.aten.empty.memory_format, 3, "Device?"),
        (torch.ops.aten.add.Tensor, 2, "number"),
        (torch.ops.aten.slice.Tensor, 2, "int?"),
        (torch.ops.aten.normal_.default, 3, "Generator?"),
        (torch.ops.aten.conv2d.padding, 4, "str"),
    ],
)
def test_schema_types_are_named_in_a_few_words(overload: Any, argument: int, text: str) -> None:
    assert str(schema_type(overload._schema.arguments[argument])) == text
