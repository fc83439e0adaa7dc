"""What a digest holds, by its definition, however the elements lie. Only equal bytes share what was computed."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Sample, TensorDigest, sample_positions
from replayfmt.format.reader import open_capture
from replayfmt.pytorch.tensors import digests, long_content
from replayfmt.pytorch.tensors.digests import BLOCK_ELEMENTS, digest_tensor, hash_tensor
from replayfmt.pytorch.tensors.memory import DTYPE_CODE

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
PIECE_BYTES = digests._PIECE_BYTES
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.view(300, -1).t(),
    "heads": lambda t: t.view(10, 30, 3, 5, -1).permute(2, 0, 3, 1, 4),
    "a third of each row": lambda t: t.view(300, 3, -1)[:, 1],
    "every other": lambda t: t[1::2],
    "expanded": lambda t: t[:150].view(3, 1, 50).expand(3, 4, 50),
    "overlapping": lambda t: t.as_strided((20, 30, 7), (5, 1, 9), 11),
    "one element": lambda t: t[7],
    "none": lambda t: t[:0],
}


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    digests._recent.clear()
    digests._older.clear()


def bits(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits: all numbers there are, NaNs and infinities too."""
    content = torch.randint(2 if dtype is torch.bool else 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return content.view(dtype)


def hash_by_definition(content: bytes, short_bytes: int | None = None) -> int:
    if len(content) <= (long_content.LONG_BYTES if short_bytes is None else short_bytes):
        return xxhash.xxh3_128_intdigest(content)
    chunks = (content[start : start + 1024] for start in range(0, len(content), 1024))
    return xxhash.xxh3_128_intdigest(b"".join(xxhash.xxh3_64_digest(each)[::-1] for each in chunks))


def by_definition(tensor: torch.Tensor) -> TensorDigest:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    content = hash_by_definition(bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")
    halves = content & ((1 << 64) - 1), content >> 64
    if flat.dtype is torch.uint64:
        every = flat.tolist()
        values = torch.tensor([float(each) for each in every], dtype=torch.float64)
    else:
        every = flat.tolist() if not flat.is_floating_point() else flat.to(torch.float64).tolist()
        values = flat.to(torch.complex128).abs() if flat.is_complex() else flat.to(torch.float64)
    sample = tuple(every[place] for place in sample_positions(len(every)))
    finite = values[values.isfinite()]
    counts = int(values.isnan().sum()), int(values.isinf().sum())
    if flat.dtype is torch.bool:
        return TensorDigest(*halves, len(every), 0, 0, None, None, None, None, tuple(int(each) for each in sample))
    if not len(finite):
        return TensorDigest(*halves, len(every), *counts, None, None, None, None, sample)
    of_reals = (None, None) if flat.is_complex() else (float(finite.min()), float(finite.max()))
    return TensorDigest(
        *halves, len(every), *counts, *of_reals, float(finite.mean()), math.sqrt(float((finite * finite).sum())), sample
    )


def assert_same(got: TensorDigest, expected: TensorDigest) -> None:
    for name in ("hash_low", "hash_high", "elements", "nan", "inf", "min", "max"):
        assert getattr(got, name) == getattr(expected, name), name
    wrapped = [each - (1 << 64) if isinstance(each, int) and each >= 1 << 63 else each for each in expected.sample]
    assert repr(list(got.sample)) == repr(wrapped)
    for name in ("mean", "l2"):
        one, other = getattr(got, name), getattr(expected, name)
        if one is None or other is None or expected.l2 == math.inf:
            assert one is other is None or expected.l2 == math.inf  # of a sum beyond float64 nothing else is certain
        else:
            assert math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-13 * (expected.l2 or 0.0)), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_what_its_definition_says(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(1)
    for base in (bits(9_000, dtype), torch.zeros(9_000 * dtype.itemsize, dtype=torch.uint8).view(dtype)):
        tensor = LAYOUTS[layout](base)
        expected = by_definition(tensor)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would be the program's
            assert_same(digest_tensor(tensor), expected)
            assert hash_tensor(tensor) == (expected.hash_low, expected.hash_high)
            assert_same(digest_tensor(tensor), expected)  # known by now


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.complex64])
def test_long_content_is_hashed_by_chunks_here_and_where_a_device_has_it(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device does it, on the host: the same operators, in pieces."""
    assert long_content.LONG_BYTES == 1 << 23
    monkeypatch.setattr(long_content, "LONG_BYTES", 5_000)
    monkeypatch.setattr(long_content, "PIECE_BYTES", 6_000)
    torch.manual_seed(4)
    tensor = LAYOUTS[layout](bits(9_000, dtype))
    expected = by_definition(tensor)
    assert_same(digest_tensor(tensor), expected)
    assert hash_tensor(tensor) == (expected.hash_low, expected.hash_high)
    found = digests._digest_on_device(digests._bits(tensor), dtype, DTYPE_CODE[dtype]) if tensor.numel() else None
    if found is not None:
        assert_same(found, expected)
    # Elsewhere it comes to the host: what has no statistics on a device, and rows that fill no whole number of chunks
    # within a piece.
    if layout in ("contiguous", "expanded", "one element"):
        has_statistics = dtype not in (torch.bool, torch.complex64)
        assert (found is not None) == (layout == "contiguous" and has_statistics)


def test_the_library_in_c_hashes_as_xxhash_does() -> None:
    digests.use_native()
    assert isinstance(getattr(long_content.LongHash.hash_chunks, "__self__", None), digests.BlockStatistics)
    content = bits(3 << 20, torch.uint8)  # enough for several threads
    found = long_content.LongHash()
    for part in content[:100], content[100:1_000], content[1_000:5_000], content[5_000:]:
        found.update(part.numpy())
    chunks = (content[start : start + 1024].numpy() for start in range(0, len(content), 1024))
    assert found.intdigest() == xxhash.xxh3_128_intdigest(
        b"".join(xxhash.xxh3_64_digest(each)[::-1] for each in chunks)
    )


def test_blocks_and_rows_of_any_length_add_up() -> None:
    torch.manual_seed(2)
    numbers = torch.randn(301_111)
    numbers[::1000], numbers[60_000:140_000] = math.nan, math.inf  # whole blocks without a finite element
    for tensor in (
        numbers,
        numbers[:300_000].view(2, 150_000).t(),
        numbers[:300_000].view(3, -1)[:, 5:99_000],
        numbers[:300_000].view(100_000, 3)[:, 1],
    ):
        assert_same(digest_tensor(tensor), by_definition(tensor))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([*DTYPES, torch.complex32]),
    layout=st.sampled_from([name for name in LAYOUTS if name != "none"]),
    rows=st.integers(1, 5),
    piece_bytes=st.integers(16, 30_000),
)
def test_a_digest_in_pieces_as_a_devices_is_that_of_the_whole(
    dtype: torch.dtype, layout: str, rows: int, piece_bytes: int
) -> None:
    tensor = LAYOUTS[layout](bits(9_000 * rows, dtype))
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = digest_tensor(tensor)
        patched.setattr(digests, "_PIECE_BYTES", piece_bytes)
        patched.setattr(digests, "_comes_in_pieces", lambda _tensor: True)
        assert_same(digest_tensor(tensor), expected)
        assert hash_tensor(tensor) == (expected.hash_low, expected.hash_high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_statistics_in_pieces_of_whole_blocks_are_those_of_the_whole_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(500_001).mul(100).to(dtype)
    expected = digest_tensor(tensor)
    monkeypatch.setattr(digests, "_PIECE_BYTES", 2 * BLOCK_ELEMENTS * dtype.itemsize)
    monkeypatch.setattr(digests, "_comes_in_pieces", lambda _tensor: True)
    assert digest_tensor(tensor) == expected
    assert PIECE_BYTES == 16 << 20 and PIECE_BYTES % (BLOCK_ELEMENTS * 16) == 0


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "transposed", "heads", "a third of each row", "every other"]),
    rows=st.integers(1, 30),
)
def test_a_digest_does_not_depend_on_threads(dtype: torch.dtype, layout: str, rows: int) -> None:
    threads = torch.get_num_threads()
    tensor = LAYOUTS[layout](bits(9_000 * rows, dtype))
    found = set()
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            digests._recent.clear()
            digests._older.clear()
            found.add(repr(digest_tensor(tensor)))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


FORKING = """
import os, signal, sys
import numpy as np, torch
import replayfmt

torch.set_num_threads(2)
numbers = torch.from_numpy(np.arange(1 << 20, dtype=np.float32))
threads = len(os.listdir("/proc/self/task"))
with replayfmt.capture(sys.argv[1], digests="ops"):
    square = numbers.view(1024, 1024)
    print("more threads:", len(os.listdir("/proc/self/task")) - threads - 1)  # the one that writes the file
    child = os.fork()
    if not child:
        signal.alarm(240)
        square.add(1).sum().item()  # with PyTorch's threads: hangs where the parent already had some
        os._exit(0)
    print("child:", os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads that Linux shows")
def test_a_digest_starts_no_thread_that_a_forked_child_would_wait_for(tmp_path: Path) -> None:
    path = tmp_path / "forking.opreplay"
    run = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.stdout.splitlines() == ["more threads: 0", "child: 0"], run.stderr
    with open_capture(path) as opened:
        assert any(record.signature.kind is RecordKind.digest for record in opened.records())
        assert opened.summary.unsupported == {"child_work": 1}


@pytest.mark.parametrize("sample", [(1.5, -0.0), (1, -7), (1j, 2 + 3j), (1, 2.5, 3j), ()])
def test_the_sample_of_a_digest_is_stored_by_its_kinds(sample: Sample) -> None:
    ints, floats = TensorDigest(1, 2, 3, 4, 5, 0.5, None, 0.25, 0.75, sample).slots()
    parts = [part for each in sample for part in ((each.real, each.imag) if isinstance(each, complex) else (each,))]
    assert ints == [1, 2, 3, 4, 5] + [each for each in parts if isinstance(each, int)]
    assert repr(floats) == repr([0.5, 0.25, 0.75] + [each for each in parts if isinstance(each, float)])


def test_a_large_transposed_tensor_is_never_copied_as_a_whole() -> None:
    tensor = torch.zeros(2000, 2000).t()
    tracemalloc.start()
    try:
        digest_tensor(tensor)
        assert tracemalloc.get_traced_memory()[1] < tensor.nbytes // 4
    finally:
        tracemalloc.stop()


def test_writes_that_nothing_tells_of_are_seen() -> None:
    """What is known of bytes is known by the bytes, not by who wrote them."""
    tensor, ones = torch.ones(64, 32), torch.ones(64, 32)
    before = digest_tensor(tensor.t())
    ctypes.memset(tensor.data_ptr() + 4 * 100, 0, 4)
    after = digest_tensor(tensor.t())
    assert before.hex != after.hex and (before.min, after.min) == (1.0, 0.0)
    ctypes.memmove(tensor.data_ptr(), ones.data_ptr(), tensor.nbytes)
    assert digest_tensor(tensor.t()) == before
    assert digest_tensor(tensor.view(torch.int32).t()).max == 0x3F800000, "other numbers of the same bytes"


def test_what_was_not_used_for_long_is_forgotten() -> None:
    for number in range(3 * digests._REMEMBERED):
        digest_tensor(torch.tensor([number]))
    assert len(digests._recent) + len(digests._older) <= 2 * digests._REMEMBERED
    assert digest_tensor(torch.tensor([5])).max == 5.0


def test_every_result_of_every_op_has_its_digest_also_where_it_is_the_same_memory(tmp_path: Path) -> None:
    path, x = tmp_path / "views.opreplay", torch.randn(6, 4)
    with replayfmt.capture(path, digests="ops"):
        y = x + 1
        y.t().unsqueeze(0).expand(2, 4, 6)
        y.mul_(2)
        torch.ops.aten.split(y.t(), 2)
    with open_capture(path) as reader:
        records = list(reader.records())
    ops = {record.ordinal: record for record in records if record.kind is RecordKind.op}
    found = [
        (record.argument("of"), record.argument("result"))
        for record in records
        if record.kind is RecordKind.digest and record.argument("of") != -1
    ]
    expected = [
        (ordinal, place)
        for ordinal, record in ops.items()
        for place in range(2 if reader.kernels[record.signature.kernel].name == "aten::split" else 1)
    ]
    assert len(ops) == 7 and [of for of, _result in found] == [of for of, _result in expected]
    with replayfmt.Plan(path) as plan:
        result = plan.execute(verify="bitwise")
        assert result.outcome == "ok" and result.verification.digests >= len(expected)
