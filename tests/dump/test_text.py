"""Text for people: a summary, then one aligned line a record, whatever a capture contains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replayfmt.dump.record_rows import contiguous, printable
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import text_chunks
from replayfmt.format.codes import DType, Layout, OpStatus, RecordKind
from replayfmt.format.codes import ValueKind as V
from replayfmt.format.model import Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import open_capture

from .captures import Builder


def text(path: Path, summary_only: bool = False) -> str:
    with open_capture(path) as reader:
        return "".join(text_chunks(reader, Selection(), summary_only))


def record_lines(path: Path) -> list[str]:
    return text(path).rpartition("\n\n")[2].splitlines()


def test_the_summary_comes_first_and_says_what_matters(plain: Path, every: Path) -> None:
    summary, legend, records = text(plain).split("\n\n")
    assert re.search(r"^file +\S+plain\.opreplay, [\d,]+ bytes, format 1\.0$", summary, re.MULTILINE)
    assert re.search(r"^complete +yes$", summary, re.MULTILINE)
    assert re.search(r"^records +100 ops of 2 kernels, 1 scope_begin, 1 scope_end$", summary, re.MULTILINE)
    assert re.search(r"^memory +101 storages, 1 payload of 16 bytes$", summary, re.MULTILINE)
    assert re.search(r"^unsupported +none$", summary, re.MULTILINE)
    assert "%7 f32[4,8]{1,4}+2 is tensor 7" in legend and legend.count("\n") == 1
    assert len(records.splitlines()) == 102
    assert text(plain, summary_only=True) == summary + "\n\n"
    assert re.search(
        r"^strict replay +refused: unsupported records, opaque arguments, kernels without code$",
        text(every, summary_only=True),
        re.MULTILINE,
    )


def test_every_record_is_one_aligned_line(every: Path, plain: Path) -> None:
    for path, count in ((every, 92), (plain, 102)):
        lines = record_lines(path)
        assert [int(line[:6]) for line in lines] == list(range(count))
        assert all(line[6:8] == "  " for line in lines)
    assert record_lines(plain)[:3] == [
        "     0  [scope_begin] name='execute'",
        "     1    aten::add.Tensor(self=%1 f32[4], other=%1 f32[4]) -> %2 f32[4]",
        "     2    aten::mul.Tensor(self=%2 f32[4], other=%2 f32[4]) -> %3 f32[4]",
    ]
    assert record_lines(plain)[-1] == "   101  [scope_end] name='execute'"


def test_a_line_shows_what_a_value_is(every: Path) -> None:
    lines = record_lines(every)
    assert lines[3].endswith(
        "aten::mm(self=%1 f32[16,64]@cpu, mat2=%2 f32[64,16]{1,64}:conj@cpu+128) -> %3 f32[16,64]@cpu"
    )
    assert lines[5].endswith("mat2=%1 f32[16,64]@cpu) raised")
    for shown in (
        "none=None, yes=True, no=False, small=7, large=9223372036854775807",
        "tenth=0.1, nan=nan, inf=inf",
        "complex=(1.5, -2.5j)",
        "text='say \"é\"\\n'",
        "dtype=float8_e4m3fn, layout=sparse_csr",
        "device=cuda:0",
        "storage=storage 1",
        "group=<process_group default_pg>",
        "empty=[], pair=(3, %1",
        "sizes=[0, 1, 2, 3, 4, 5, 6, 7, … 4 more], one=[5]",
        "@cpu, … 2 more], nested=[[8, 9], [0.5]]",
        "matrix=sparse_coo(%5 i64[2,5]@cpu",
        "-> %6 bf16[8]@cuda:0, [%1",
    ):
        assert shown in lines[6]
    assert lines[7].endswith(
        "[host_read] method='tolist', tensor=%3 f32[16,64]@cpu, hash=000000000000009fffffffffffffffff, elements=3"
    )
    assert lines[12].endswith("[storage_release] storage 3")
    assert lines[14].endswith(
        "[global_state] grad_enabled=False, num_threads=2, min=0.25, precision='high', nothing=None"
    )
    assert lines[-7].endswith("[event_record] event=1, device=cuda:0, stream=0")
    assert lines[-5].endswith("-> %3 f32[16,64]@cpu  on cuda:0 stream 2")
    assert lines[16].endswith(
        "[unsupported] reason='compiled_region', op='CompiledFxGraph', detail='fused kernels are not seen'"
    )


def test_nothing_in_a_capture_can_break_a_line_or_steer_a_terminal(every: Path) -> None:
    assert all(line.isprintable() for line in text(every).split("\n"))
    assert printable("a\nb\x1b[31m\u202e") == r"a\nb\x1b[31m\u202e"
    assert printable("é日 😀") == "é日 😀"
    assert printable("x" * 50, 10) == "x" * 9 + "…"


def test_long_lists_and_deep_scopes_do_not_make_endless_lines(tmp_path: Path) -> None:
    b = Builder(tmp_path / "wide.opreplay")
    w = b.writer
    cpu = w.device(Device("cpu"))
    tensor = b.tensor(b.storage(16, cpu), w.meta(TensorMeta(DType.float32, Layout.strided, cpu, (4,), (1,))))
    kernel = w.kernel(Kernel("aten::_foreach_add_", "List", ""))
    many = tuple(Node(V.list, name, None, (Node(V.tensor),) * 300) for name in ("self", "other"))
    scope = 0
    for depth in range(60):
        scope = w.scope(scope, f"level{depth}")
    b.record(Signature(RecordKind.op, many, (), kernel, OpStatus.ok), [tensor] * 600, scope=scope)
    b.record(Signature(RecordKind.op, (Node(V.string, "text", "long " * 1000),), (), kernel, OpStatus.ok))
    b.frame()
    first, second = record_lines(b.close())
    items = "[%1 f32[4], %1 f32[4], %1 f32[4], … 297 more]"
    assert first.strip() == "0  " + "  " * 16 + f"aten::_foreach_add_.List(self={items}, other={items})"
    assert len(second) < 140


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((), (), True),
        ((4,), (1,), True),
        ((4,), (2,), False),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 77, 1), True),
        ((1,), (9,), True),
        ((0, 3), (3, 1), True),
    ],
)
def test_contiguous_is_row_major_without_gaps(sizes: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert contiguous(TensorMeta(DType.float32, Layout.strided, 1, sizes, strides)) == expected
