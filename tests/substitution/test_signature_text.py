"""Signatures as text: what is printed is read back, what is read says where it is wrong, what is asked for is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import replayfmt
from replayfmt.errors import UsageError
from replayfmt.format.codes import DType, RecordKind
from replayfmt.format.model import Record
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.signature_grammar import (
    TYPES,
    AnyValue,
    DeviceText,
    Items,
    Number,
    SignatureText,
    TensorText,
    Text,
    ValueText,
    Word,
    runs_of,
)
from replayfmt.format.signature_text import SignatureIndex, matches, parse_signature, signature_of, signature_text

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
DEVICES = st.one_of(NAMES, st.builds("{}:{}".format, NAMES, st.integers(0, 99)), st.text(min_size=1, max_size=4))
SIZES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> TensorText:
    sizes = draw(SIZES)
    strides = draw(
        st.one_of(
            st.none(),
            st.just(AnyValue()),
            st.lists(st.integers(0, 2**40), min_size=len(sizes), max_size=len(sizes)).map(tuple),
        )
    )
    wanted = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    notes = draw(st.lists(st.sampled_from(["conj", "neg", "zero", "sparse_coo"]), unique=True).map(tuple))
    return TensorText(
        draw(st.sampled_from([dtype.name for dtype in DType if dtype])),
        tuple(size if fixed else None for size, fixed in zip(sizes, wanted, strict=True)),
        strides,
        notes,
        draw(st.one_of(st.just(""), DEVICES)),
    )


VALUES: st.SearchStrategy[ValueText] = st.recursive(
    st.one_of(
        st.just(AnyValue()),
        st.sampled_from(["None", "True", "channels_last", "strided", *TYPES.values()]).map(Word),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: Number(repr(value))),
        st.floats().map(lambda value: Number(repr(value))),
        st.builds(Text, st.text(), st.sampled_from(["", "opaque", "process_group"])),
        DEVICES.map(DeviceText),
        tensors(),
    ),
    lambda inner: st.builds(
        lambda form, values, counts: Items(form, tuple((value, count + counts) for value, count in runs_of(values))),
        st.one_of(
            st.sampled_from(["[", "(", "composite", "opaque"]),
            NAMES,
            st.text(min_size=1, max_size=5).filter(lambda form: form not in ("[", "(")),
        ),
        st.lists(inner, max_size=3),
        st.integers(0, 5),
    ),
    max_leaves=6,
)
ARGUMENT_NAMES = st.one_of(st.just(""), NAMES, st.text(min_size=1, max_size=4))
SIGNATURES = st.builds(
    SignatureText,
    st.one_of(st.builds("{}::{}.{}".format, NAMES, NAMES, NAMES), st.text(max_size=8)),
    st.lists(st.tuples(ARGUMENT_NAMES, VALUES), max_size=4).map(tuple),
)


@pytest.mark.slow
@given(SIGNATURES)
def test_whatever_is_printed_is_read_back_to_the_same_and_holds_no_equals_sign(signature: SignatureText) -> None:
    text = str(signature)
    assert parse_signature(text) == signature
    assert "=" not in text and text.isascii() and text.isprintable()


@given(st.text(alphabet='aten::m.() [],float32x*@"\\{}1-:', max_size=40))
def test_whatever_is_written_is_a_signature_or_a_usage_error_that_names_a_place(text: str) -> None:
    try:
        signature = parse_signature(text)
    except UsageError as error:
        assert "not a signature: expected" in str(error)
    else:
        assert parse_signature(str(signature)) == signature


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a kernel and its arguments in parentheses"),
        ("aten::mm", "expected a kernel and its arguments in parentheses"),
        ("mm(float32[2])", "expected a kernel with its overload, like 'aten::mm.default' at character 1"),
        ("aten::mm.default(", "expected a value at its end"),
        ("aten::mm.default(floaty[3])", "expected a dtype, like float32 at character 18, found 'floaty[3])'"),
        ("aten::mm.default(float32[3,a])", "expected a whole number at character 28, found 'a])'"),
        ("aten::mm.default(float32[3]{1,2})", "expected 1 strides, or {*} at character 28"),
        ("aten::mm.default(float32[3]:odd)", "expected one of conj, neg, zero"),
        ("aten::mm.default(float32[3]) x", "expected nothing more at character 30"),
        ("aten::mm.default(float32[3] x 2)", "expected ')' at character 29"),
        ("aten::mm.default([float32[3] x 0])", "expected a whole number from 1 at character 32"),
        ("aten::mm.default(number)", "expected a value at character 18"),
        ("aten::mm.default(" + "[" * 99, "at most 64 brackets inside one another"),
        ("aten::mm.default(" + "9" * 30 + ")", "a number of 64 bits"),
    ],
)
def test_what_is_no_signature_says_what_was_expected_and_where(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_signature(text)
    assert said in str(raised.value)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CaptureReader, dict[str, Record]]]:
    """A capture of many kinds of arguments; its ops by name (the last of each)."""
    path = tmp_path_factory.mktemp("signatures") / "calls.opreplay"
    with replayfmt.capture(path, digests="none"):
        x = torch.ones(4, 5)
        torch.add(x, x, alpha=2)
        torch.mm(x, x.t())
        x.sum(1)
        x.add_(1.5)
        torch.cat([x, x, x[:1]])
        x.to(torch.float64)
        x.clone(memory_format=torch.contiguous_format)
        torch.nn.functional.gelu(x, approximate="tanh")
        torch._foreach_add_([x, torch.ones(4)], 1)
        torch.ones(0, 3).t().neg()
        x[1]
        torch.eye(3).to_sparse().mul(2.0)
    with open_capture(path) as reader:
        ops = [record for record in reader.records() if record.kind is RecordKind.op]
        yield reader, {reader.kernels[record.signature.kernel].name.partition("::")[2]: record for record in ops}


Calls = tuple[CaptureReader, dict[str, Record]]


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("mm", "aten::mm.default(float32[4,5], float32[5,4]{1,5})"),
        ("add", "aten::add.Tensor(float32[4,5], float32[4,5], alpha: int)"),
        ("sum", "aten::sum.dim_IntList(float32[4,5], [int])"),
        ("add_", "aten::add_.Tensor(float32[4,5], float)"),
        ("cat", "aten::cat.default([float32[4,5] x 2, float32[1,5]])"),
        ("_to_copy", "aten::_to_copy.default(float32[4,5], dtype: float64)"),
        ("clone", "aten::clone.default(float32[4,5], memory_format: contiguous_format)"),
        ("gelu", 'aten::gelu.default(float32[4,5], approximate: "tanh")'),
        ("_foreach_add_", "aten::_foreach_add_.Scalar([float32[4,5], float32[4]], int)"),
        ("neg", "aten::neg.default(float32[3,0])"),
        ("select", "aten::select.int(float32[4,5], int, int)"),
    ],
)
def test_signatures_of_a_capture_read_as_a_person_would_write_them(calls: Calls, op: str, text: str) -> None:
    reader, ops = calls
    assert signature_text(ops[op], reader) == text


def test_every_op_of_a_capture_matches_what_is_printed_of_it_with_and_without_its_numbers(calls: Calls) -> None:
    reader, ops = calls
    assert any("sparse_coo(" in signature_text(record, reader) for record in ops.values())
    for record in ops.values():
        for values in (False, True):
            signature = signature_of(record, reader, values=values)
            assert parse_signature(str(signature)) == signature
            assert matches(signature, record, reader)


@pytest.mark.parametrize(
    ("op", "text", "wanted"),
    [
        ("mm", "aten::mm.default(float32[4,*], float32[*,4]{*})", True),
        ("mm", "aten::mm.default(*, *)", True),
        ("mm", "aten::mm.default(self: float32[4,5], mat2: *)", True),
        ("mm", "aten::mm.default(mat2: float32[4,5], self: *)", False),
        ("mm", "aten::mm.default(float32[4,5]@cpu, *)", True),
        ("mm", "aten::mm.default(float32[4,5]@cuda:0, *)", False),
        ("mm", "aten::mm.default(float32[4,5], float32[5,4])", False),
        ("mm", "aten::mm.default(float32[4,5], float32[5,4]{1,4})", False),
        ("mm", "aten::mm.default(float32[4,5])", False),
        ("mm", "aten::mm.out(float32[4,5], float32[5,4]{1,5})", False),
        ("mm", "aten::mm.default(float16[4,5], *)", False),
        ("add", "aten::add.Tensor(float32[4,5], float32[4,5], alpha: 2)", True),
        ("add", "aten::add.Tensor(float32[4,5], float32[4,5], alpha: 2.0)", False),
        ("add", "aten::add.Tensor(float32[4,5], float32[4,5], int)", False),
        ("sum", "aten::sum.dim_IntList(float32[4,5], [1])", True),
        ("sum", "aten::sum.dim_IntList(float32[4,5], [0])", False),
        ("add_", "aten::add_.Tensor(float32[4,5], 1.5)", True),
        ("cat", "aten::cat.default([float32[*,5] x 3])", True),
        ("cat", "aten::cat.default([* x 2])", False),
        ("cat", "aten::cat.default([float32[4,5], * x 2])", True),
        ("clone", "aten::clone.default(float32[4,5]{5,1}, memory_format: *)", True),
        ("gelu", 'aten::gelu.default(float32[4,5], approximate: "none")', False),
    ],
)
def test_a_written_signature_finds_the_calls_it_asks_for(calls: Calls, op: str, text: str, wanted: bool) -> None:
    reader, ops = calls
    assert matches(parse_signature(text), ops[op], reader) is wanted


def test_only_numbers_that_stand_for_themselves_make_calls_of_one_signature_differ(calls: Calls) -> None:
    reader, ops = calls
    assert not parse_signature(signature_text(ops["sum"], reader)).asks_for_values
    assert signature_of(ops["sum"], reader, values=True).asks_for_values


def test_the_signatures_module_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from replayfmt.format.signature_text import parse_signature; "
        "print(parse_signature('aten::mm.default(float32[2,3], *)'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "aten::mm.default(float32[2,3], *)\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.opreplay")), ids=lambda path: path.stem)
def test_every_op_of_a_golden_capture_has_a_signature_that_finds_it(path: Path) -> None:
    """Among them are values of every kind that the format has."""
    with open_capture(path) as reader:
        for record in reader.records():
            if record.kind is RecordKind.op:
                for values in (False, True):
                    signature = signature_of(record, reader, values=values)
                    assert parse_signature(str(signature)) == signature
                    assert matches(signature, record, reader)


def test_groups_count_the_calls_of_each_signature_and_name_the_first(tmp_path: Path) -> None:
    path = tmp_path / "groups.opreplay"
    with replayfmt.capture(path, digests="none"):
        x = torch.ones(2, 3)
        weight = torch.ones(3, requires_grad=True)
        for size in (1, 2, 1):
            x[:size].mul(weight)
            x[:size].mul(weight.detach())
    with open_capture(path) as reader:
        index = SignatureIndex(reader)
        kernel = next(number for number, kernel in enumerate(reader.kernels) if kernel and kernel.name == "aten::mul")
        groups = {group.text: group for group in index.groups([kernel])}
        assert {text: group.calls for text, group in groups.items()} == {
            "aten::mul.Tensor(float32[1,3], float32[3])": 4,
            "aten::mul.Tensor(float32[2,3], float32[3])": 2,
        }
        for group in groups.values():
            assert signature_text(reader.record(group.first), reader) == group.text
        assert sum(group.calls for group in index.groups()) == reader.summary.records[RecordKind.op]
        for text, calls in (
            ("aten::mul.Tensor(float32[1,3], *)", 4),
            ("aten::mul.Tensor(*, *)", 6),
            ("aten::slice.Tensor(*, int, int, 1)", 4),
            ("aten::slice.Tensor(*, int, int, int)", 6),
        ):
            found = [int(ordinal) for ops in index.matching(parse_signature(text)) for ordinal in ops.ordinals]
            assert len(found) == calls, text
            assert all(matches(parse_signature(text), reader.record(ordinal), reader) for ordinal in found)
