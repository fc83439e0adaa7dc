"""Kernels with probes in them, run by a small interpreter: they compute what they computed without, and what the probes
save is what the kernels' own arithmetic says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from replayfmt.probes.definitions import ProbeDefinition, parse_probe, shipped_probes
from replayfmt.probes.ptx import PtxError, parse_ptx, probed_ptx

from .interpreter import SM, Device, launch
from .kernels import ptx
from .test_definitions import MINE

PROBES = {probe.name: probe for probe in shipped_probes()}
FLOATS = np.random.default_rng(5).normal(size=4096).astype(np.float32)
Shape = tuple[int, int, int]


@dataclass
class Case:
    """A kernel with its launch. `prepare`: places its arguments on a device; their values, and where and what is
    computed."""

    file: str
    entry: str
    grid: Shape
    block: Shape
    prepare: Callable[[Device], tuple[list[int], int, np.ndarray[Any, Any]]]

    def run(
        self, text: str, *more: int, device: Device | None = None
    ) -> tuple[np.ndarray[Any, Any], Device, dict[str, Any]]:
        """What a module with this kernel computes, the device after it, and what the interpreter counted."""
        device = device or Device()
        values, out, expected = self.prepare(device)
        counts = launch(parse_ptx(text), self.entry, device, self.grid, self.block, *values, *more)
        return device.read(out, expected.dtype, expected.size).reshape(expected.shape), device, counts

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def elementwise(result: Callable[..., Any], arrays: int, n: int, extra: int = 2) -> Callable[[Device], Any]:
    """Arguments of a Triton kernel: `arrays` inputs of n floats, the output, n, and two that Triton adds."""

    def prepare(device: Device) -> Any:
        inputs = [FLOATS[1000 * place :][:n] for place in range(arrays)]
        places = [device.place(each) for each in inputs]
        out = device.place(np.zeros(n, np.float32))
        return [*places, out, n, *[0] * extra], out, np.asarray(result(*inputs), np.float32)

    return prepare


def gather(device: Device) -> Any:
    index = np.random.default_rng(6).integers(0, 500, 200).astype(np.int32)
    x, at, out = device.place(FLOATS[:500]), device.place(index), device.place(np.zeros(200, np.float32))
    return [x, at, out, 200, 0, 0], out, FLOATS[:500][index]


def rows(result: Callable[[Any], Any], keep: bool) -> Callable[[Device], Any]:
    def prepare(device: Device) -> Any:
        matrix = FLOATS[:300].reshape(3, 100)
        x, out = device.place(matrix), device.place(np.zeros(300 if keep else 3, np.float32))
        return [x, out, 100, 0, 0], out, np.asarray(result(matrix), np.float32)

    return prepare


def softmax(matrix: Any) -> Any:
    power = np.exp(matrix - matrix.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


def transpose(extra: int) -> Callable[[Device], Any]:
    def prepare(device: Device) -> Any:
        matrix = np.arange(20 * 28, dtype=np.int32).reshape(20, 28)
        x, out = device.place(matrix), device.place(np.zeros(20 * 28, np.int32))
        sizes = [28, 20] if not extra else [20, 28]
        return [x, out, *sizes, *[0] * extra], out, matrix.T

    return prepare


def matmul(device: Device) -> Any:
    a = FLOATS.reshape(64, 64).astype(np.float16)
    b = np.roll(a, 7)
    places = [device.place(a), device.place(b)]
    out = device.place(np.zeros((64, 64), np.float32))
    return [*places, out, 64, 0, 0], out, a.astype(np.float32) @ b.astype(np.float32)


def fill(device: Device) -> Any:
    out = device.place(np.zeros(200, np.float32))
    return [out, bits(2.5), 150], out, np.where(np.arange(200) < 150, np.float32(2.5), np.float32(0))


def saxpy(device: Device) -> Any:
    x, y = device.place(FLOATS[:300]), device.place(FLOATS[300:600])
    return [x, y, bits(3.0), 300], y, 3 * FLOATS[:300] + FLOATS[300:600]


def collatz(device: Device) -> Any:
    def steps(value: int) -> int:
        return 0 if value <= 1 else 1 + steps(3 * value + 1 if value % 2 else value // 2)

    numbers = np.arange(50, dtype=np.uint32)
    x, out = device.place(numbers), device.place(np.zeros(50, np.uint32))
    return [x, out, 50], out, np.array([steps(int(each)) for each in numbers], np.uint32)


def returned(device: Device) -> Any:
    out = device.place(np.zeros(64, np.uint32))
    return [out, 40], out, np.where(np.arange(64) < 40, 2 * np.arange(64), 0).astype(np.uint32)


def pointers(device: Device) -> Any:
    numbers = device.place(np.arange(8, dtype=np.uint32))
    second = device.place(np.array([numbers + 32], np.uint64))
    first = device.place(np.array([0, second], np.uint64))
    out = device.place(np.zeros(1, np.uint32))
    return [first, out], out, np.array([4 + 5 + 6 + 7], np.uint32)


LINE: Shape = (64, 1, 1)
CASES = {
    case.entry: case
    for case in (
        Case("triton_add", "triton_add", (2, 1, 1), LINE, elementwise(np.add, 2, 200)),
        Case("triton_fill", "triton_fill", (2, 1, 1), LINE, elementwise(lambda: np.full(200, 7.0), 0, 200)),
        Case("triton_relu", "triton_relu", (2, 1, 1), LINE, elementwise(lambda x: np.maximum(x, 0), 1, 200)),
        Case("triton_gather", "triton_gather", (2, 1, 1), LINE, gather),
        Case("triton_row_sum", "triton_row_sum", (3, 1, 1), LINE, rows(lambda x: x.sum(axis=1), keep=False)),
        Case("triton_softmax", "triton_softmax", (3, 1, 1), LINE, rows(softmax, keep=True)),
        Case("triton_transpose", "triton_transpose", (2, 2, 1), LINE, transpose(2)),
        Case("triton_matmul", "triton_matmul", (2, 2, 1), LINE, matmul),
        Case("cuda", "cuda_fill", (4, 1, 1), (48, 1, 1), fill),
        Case("cuda", "cuda_saxpy", (2, 1, 1), (40, 1, 1), saxpy),
        Case("cuda", "cuda_transpose", (2, 2, 1), (16, 16, 1), transpose(0)),
        Case("cuda", "cuda_collatz", (2, 1, 1), (33, 1, 1), collatz),
        Case("predicated_return", "predicated_return", (1, 1, 1), LINE, returned),
        Case("overwritten_address", "overwritten_address", (1, 1, 1), (1, 1, 1), pointers),
    )
}


def texts(case: Case) -> list[str]:
    """The PTX of a case, for both architectures where it is Triton's."""
    return [ptx(case.file, each) for each in (80, 90)] if case.file.startswith("triton") else [ptx(case.file)]


def recorded(case: Case, text: str, name: str | ProbeDefinition) -> tuple[Any, Any, dict[str, Any]]:
    """What the kernel computes with a probe in it, its records, and what the interpreter counted. A probe that saves
    each time runs twice, first to count."""
    probe, module = PROBES[name] if isinstance(name, str) else name, parse_ptx(text)
    device, capacity = Device(), 1
    more: list[int] = []
    if probe.each_site:
        counting = Device()
        counters = counting.place(np.zeros(case.blocks * case.threads, np.uint64))
        case.run(probed_ptx(module, case.entry, probe, counting=True).text, counters, device=counting)
        capacity = int(counting.read(counters, np.uint64, case.blocks * case.threads).max())
        more = [capacity]
    in_block = -(-case.threads // 32) if probe.level == "warp" else case.threads
    shape = (case.blocks, in_block, capacity)
    place = device.place(np.zeros(shape, probe.layout.dtype))
    found, device, counts = case.run(probed_ptx(module, case.entry, probe).text, place, *more, device=device)
    records = device.read(place, probe.layout.dtype, int(np.prod(shape))).reshape(shape)
    return found, records, counts


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_computes_what_the_kernel_is_for(name: str) -> None:
    case = CASES[name]
    for text in texts(case):
        found, _device, _counts = case.run(text)
        expected = case.prepare(Device())[2]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_probe_changes_no_bit_of_what_a_kernel_computes(name: str) -> None:
    case = CASES[name]
    for text in texts(case):
        alone, _device, counts = case.run(text)
        for probe in PROBES:
            try:
                found, _records, with_probe = recorded(case, text, probe)
            except PtxError as error:
                assert "the kernel has none" in str(error)
                continue
            assert found.tobytes() == alone.tobytes(), probe
            if probe == "progress":
                assert (with_probe["branch"] == counts["branch"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_probes_count_is_what_the_interpreter_counted(name: str) -> None:
    case = CASES[name]
    for text in texts(case):
        _found, _device, counts = case.run(text)
        reached = counts["global_load"] + counts["global_store"] + counts["async_copy"]
        _found, accesses, _counts = recorded(case, text, "dmat")
        assert ((accesses["address"] != 0).sum(axis=2) == reached).all()
        if counts["matrix"].any():
            _found, matrices, _counts = recorded(case, text, "tensorop_count")
            assert (matrices["count"][:, :, 0] == counts["matrix"]).all()
        if counts["branch"].any():
            _found, progress, _counts = recorded(case, text, "progress")
            assert ((progress["clock"] != 0).sum(axis=2) == counts["branch"]).all()
            assert (np.diff(np.where(progress["clock"] == 0, 10**9, progress["clock"].astype(np.int64))) >= 0).all()


@pytest.mark.parametrize("name", CASES)
def test_every_warp_is_recorded_with_its_sm_and_the_time_it_took(name: str) -> None:
    case = CASES[name]
    _found, records, _counts = recorded(case, texts(case)[0], "block_sched")
    assert (records["sm"] == SM).all() and (records["start"] > 0).all() and (records["elapsed"] > 0).all()
    assert records.shape == (case.blocks, -(-case.threads // 32), 1)


def test_the_addresses_of_a_fill_are_one_for_each_thread_in_range() -> None:
    case = CASES["cuda_fill"]
    device = Device()
    device.place(np.zeros((4, 48, 1), PROBES["dmat"].layout.dtype))
    out = case.prepare(device)[0][0]
    _found, records, _counts = recorded(case, ptx("cuda"), "dmat")
    index = np.arange(4 * 48).reshape(4, 48)
    assert (records["address"][:, :, 0] == np.where(index < 150, out + 4 * index, 0)).all()


def test_the_addresses_of_a_grid_stride_loop_are_loads_and_a_store_at_each_turn() -> None:
    case = CASES["cuda_saxpy"]
    _found, records, _counts = recorded(case, ptx("cuda"), "dmat")
    device = Device()
    device.place(np.zeros(records.shape, PROBES["dmat"].layout.dtype))
    x, y = case.prepare(device)[0][:2]
    for thread in range(80):
        expected = [base + 4 * at for at in range(thread, 300, 80) for base in (x, y, y)]
        row = records["address"][thread // 40, thread % 40].tolist()
        assert sorted(row[: len(expected)]) == sorted(expected) and not any(row[len(expected) :])


def test_an_overwritten_register_does_not_hide_an_address() -> None:
    case = CASES["overwritten_address"]
    _found, records, _counts = recorded(case, ptx("overwritten_address"), "dmat")
    device = Device()
    device.place(np.zeros(records.shape, PROBES["dmat"].layout.dtype))
    first, out = case.prepare(device)[0]
    second = int(device.read(first, np.uint64, 2)[1])
    numbers = int(device.read(second, np.uint64, 1)[0])
    assert records["address"].ravel().tolist() == [first + 8, second, numbers - 16, out]


# Kernel: bytes loaded and stored, and bytes copied asynchronously, in all.
BYTES = {
    "triton_add": (200 * 12, 0),
    "triton_fill": (200 * 4, 0),
    "triton_relu": (200 * 8, 0),
    "triton_gather": (200 * 8 + 256 * 4, 0),  # what an index leads to is loaded for all of the two blocks
    "triton_transpose": (20 * 28 * 8, 0),
    "triton_matmul": (64 * 64 * 4, 4 * 2 * 2 * 32 * 32 * 2),  # 4 blocks × 2 turns × 2 tiles of halves
    "cuda_fill": (150 * 4, 0),
    "cuda_saxpy": (300 * 12, 0),
    "cuda_transpose": (20 * 28 * 8, 0),
    "cuda_collatz": (50 * 8, 0),
    "predicated_return": (40 * 4, 0),
    "overwritten_address": (8 + 8 + 16 + 4, 0),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_memory_are_those_of_the_arithmetic(name: str) -> None:
    case = CASES[name]
    for text in texts(case):
        _found, records, _counts = recorded(case, text, "gmem_bytes")
        assert (int(records["sync_bytes"].sum()), int(records["async_bytes"].sum())) == BYTES[name]


@pytest.mark.slow
def test_matrix_instructions_are_those_of_the_tiles() -> None:
    """32 × 32 × 32 in two warps: 2 × 4 × 2 products of 16 × 8 × 16, half of them in each warp, in two turns."""
    for text in texts(CASES["triton_matmul"]):
        _found, records, _counts = recorded(CASES["triton_matmul"], text, "tensorop_count")
        assert set(records["count"].ravel().tolist()) == {2 * 8}


def test_a_row_that_is_full_takes_no_more_records() -> None:
    """With less room than accesses, the first are kept, and nothing beside the row is written."""
    case = CASES["cuda_saxpy"]
    probe = PROBES["dmat"]
    device = Device()
    place = device.place(np.zeros(80 * 2, probe.layout.dtype))
    guard = device.place(np.full(64, 0xAB, np.uint8))
    text = probed_ptx(parse_ptx(ptx("cuda")), case.entry, probe).text
    case.run(text, place, 2, device=device)
    records = device.read(place, probe.layout.dtype, 160).reshape(80, 2)
    assert (records["address"] != 0).all() and (device.read(guard, np.uint8, 64) == 0xAB).all()


def test_a_probe_of_the_users_own_counts_stores() -> None:
    case, probe = CASES["cuda_saxpy"], parse_probe(MINE, "mine.toml")
    device = Device()
    place = device.place(np.zeros(80, np.uint64))
    case.run(probed_ptx(parse_ptx(ptx("cuda")), case.entry, probe).text, place, device=device)
    assert device.read(place, np.uint64, 80).tolist() == [len(range(thread, 300, 80)) for thread in range(80)]
