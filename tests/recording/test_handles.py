"""Operators that give the program the address of an object: a replay has another object, at another address."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.statistics import MinTime
from replayfmt.errors import ReplayRefused, SubstitutionRejected
from replayfmt.format.codes import RecordKind
from replayfmt.replay.plan import Plan

from .conftest import Capture

OBJECTS: dict[int, float] = {}  # what lives behind the library, by its address: here a factor
# As operators in C++ are: of those in Python, what happens inside can be recorded.
WHOLE = ("addresses::apply", "addresses::apply_directly")
KEPT: list[ctypes.Array[ctypes.c_char]] = []


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    """Operators in the style of vLLM's oneDNN matrix products: made once, given back as an integer, or in a tensor."""
    with torch.library._scoped_library("addresses", "DEF") as lib:
        lib.define("make(Tensor weight) -> int")
        lib.define("apply(Tensor(a!) out, Tensor x, Tensor handle) -> ()")
        lib.define("apply_directly(Tensor x, int handle) -> Tensor")
        lib.define("release(int handle) -> ()")
        lib.define("number(Tensor x) -> int")
        lib.define("count(Tensor(a!) out, Tensor x) -> ()")

        def make(weight: torch.Tensor) -> int:
            KEPT.append(ctypes.create_string_buffer(4096))
            address = ctypes.addressof(KEPT[-1])
            OBJECTS[address] = ctypes.c_float.from_address(weight.data_ptr()).value
            return address

        def apply(out: torch.Tensor, x: torch.Tensor, handle: torch.Tensor) -> None:
            torch.mul(x, OBJECTS[int(handle)], out=out)

        def release(handle: int) -> None:
            del OBJECTS[handle]

        lib.impl("make", make, "CPU")
        lib.impl("apply", apply, "CPU")
        lib.impl("apply_directly", lambda x, handle: x * OBJECTS[handle], "CPU")
        lib.impl("release", release, "CompositeExplicitAutograd")
        lib.impl("number", lambda x: 1 << 50, "CPU")
        lib.impl("count", lambda out, x: (out[:2].fill_(x.numel()), None)[1], "CPU")
        yield


@pytest.fixture
def capture(capture: Capture) -> Capture:
    """These stand for operators in C++, whose inside nobody looks at."""
    return functools.partial(capture, whole=["addresses::*"])


@pytest.fixture(autouse=True)
def _no_object_is_left() -> Iterator[None]:
    yield
    OBJECTS.clear()


def _through_a_tensor() -> torch.Tensor:
    handle = torch.tensor(torch.ops.addresses.make(torch.full((3,), 2.0)), dtype=torch.int64)
    out = torch.zeros(3)
    torch.ops.addresses.apply(out, torch.arange(3.0), handle)
    torch.ops.addresses.release(handle.item())
    return out


def _through_an_integer() -> torch.Tensor:
    handle = torch.ops.addresses.make(torch.full((3,), 2.0))
    first = torch.ops.addresses.apply_directly(torch.arange(3.0), handle)
    for _ in range(4):
        first = torch.ops.addresses.apply_directly(first, handle)
    torch.ops.addresses.release(handle)
    return first


@pytest.mark.parametrize("program", [_through_a_tensor, _through_an_integer])
@pytest.mark.parametrize("digests", ["live", "ops"])
def test_a_replay_uses_the_object_that_it_made_itself(
    capture: Capture, program: Callable[[], torch.Tensor], digests: str
) -> None:
    captured = capture(program, digests=digests)
    assert captured.unsupported() == {}
    assert not OBJECTS, "the program released its object"
    addresses = {ctypes.addressof(each) for each in KEPT}
    content = captured.path.read_bytes()
    assert not any(address.to_bytes(8, "little") in content for address in addresses)
    captured.replays()
    captured.replays()
    assert not OBJECTS, "the replays released theirs"


@pytest.mark.slow
def test_two_objects_at_one_address_one_after_the_other_are_two(capture: Capture) -> None:
    def program() -> torch.Tensor:
        total = torch.zeros(3)
        for factor in (2.0, 3.0):
            handle = torch.ops.addresses.make(torch.full((3,), factor))
            total = total + torch.ops.addresses.apply_directly(torch.ones(3), handle)
            torch.ops.addresses.release(handle)
            # The next object gets the same memory.
            KEPT[0], KEPT[-1] = KEPT[-1], KEPT[0]
            del KEPT[1:]
            gc.collect()
        return total

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_an_object_made_before_the_capture_is_an_opaque_argument(capture: Capture) -> None:
    address = 0
    while address % mmap.PAGESIZE == 0:  # such a number counts as a size where the heap is below 4 GiB
        address = torch.ops.addresses.make(torch.ones(3))
    handle = torch.tensor(address)

    def through_a_tensor() -> torch.Tensor:
        out = torch.zeros(3)
        torch.ops.addresses.apply(out, torch.ones(3), handle)
        return out

    for program in (through_a_tensor, lambda: torch.ops.addresses.apply_directly(torch.ones(3), address)):
        captured = capture(program, whole=WHOLE)
        assert captured.unsupported() == {"opaque_argument": 1}
        (record,) = captured.records(RecordKind.unsupported)
        assert "address" in str(record.argument("detail"))
        with pytest.raises(ReplayRefused) as refused:
            Plan(captured.path)
        assert any("address" in str(finding) for finding in refused.value.findings)


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_small_number_for_state_made_before_the_capture_is_an_opaque_argument(
    capture: Capture, made_inside: bool
) -> None:
    with torch.library._scoped_library("managers", "DEF") as lib:
        factors: list[float] = []
        lib.define("make(Tensor weight) -> int")
        lib.define("apply(int handle, Tensor x) -> Tensor")
        lib.impl("make", lambda weight: (factors.append(float(weight)), len(factors) - 1)[1], "CPU")
        lib.impl("apply", lambda handle, x: x * factors[handle], "CPU")
        weight, x = torch.tensor(2.0), torch.ones(2)
        handle = torch.ops.managers.make(weight)

        def program() -> None:
            x + 1
            torch.ops.managers.apply(torch.ops.managers.make(weight) if made_inside else handle, x)

        captured = capture(program, whole=("managers::*",))
        found = [record.argument("detail") for record in captured.records(RecordKind.unsupported)]
        if made_inside:
            assert found == []
        else:
            assert "stands for state that another operator made before the capture began" in found[0]


def test_a_table_of_addresses_is_an_opaque_argument(capture: Capture) -> None:
    def program() -> torch.Tensor:
        table = torch.tensor([0, torch.ops.addresses.make(torch.ones(3))])
        out = torch.zeros(3)
        torch.ops.addresses.apply(out, torch.ones(3), table[1])
        return out

    assert capture(program, whole=WHOLE).unsupported() == {"opaque_argument": 1}


def test_an_address_in_memory_that_nobody_wrote_has_no_meaning(capture: Capture) -> None:
    """Freed memory is full of them, and `torch.empty` gives it out again."""

    def program() -> torch.Tensor:
        left = (ctypes.c_int64 * 4)(*[ctypes.addressof(KEPT[0])] * 4)
        out = torch.empty(4, dtype=torch.int64)
        ctypes.memmove(torch._C.StorageBase.data_ptr(out.untyped_storage()), left, 32)  # what the memory held before
        for _ in range(2):  # the second is given what the first has left
            torch.ops.addresses.count(out, torch.ones(3))
        return out[:2]

    KEPT.append(ctypes.create_string_buffer(4096))
    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_memory_of_an_address_that_is_overwritten_is_refused(capture: Capture) -> None:
    def program() -> torch.Tensor:
        handle = torch.tensor(torch.ops.addresses.make(torch.ones(3)))
        return handle.fill_(7)

    assert capture(program).unsupported() == {"opaque_argument": 1}


def test_a_large_number_that_is_no_address_stays_a_number(capture: Capture) -> None:
    captured = capture(lambda: (torch.ops.addresses.number(torch.ones(1)), torch.zeros(2)))
    assert captured.unsupported() == {}
    assert (1 << 50,) in [op.results for op in captured.records(RecordKind.op)]


def test_without_content_an_address_is_passed_on_too(capture: Capture) -> None:
    captured = capture(_through_a_tensor, payload="none")
    assert captured.unsupported() == {}
    with Plan(captured.path) as plan:
        assert plan.execute().outcome == "ok"
    assert not OBJECTS


def test_a_replay_says_that_addresses_are_not_compared(capture: Capture) -> None:
    captured = capture(_through_an_integer)
    with Plan(captured.path) as plan:
        result = plan.execute(verify="bitwise")
    (opaque,) = result.opaque_results
    assert (opaque.op, opaque.calls) == ("addresses::make.default", 1) and "address" in opaque.why


def test_what_releases_an_object_runs_once(capture: Capture, tmp_path: Path) -> None:
    """Measured on its own, compared with a replacement, or run twice, it would release the object twice."""
    captured = capture(_through_an_integer)
    with Plan(captured.path, keep_going=True) as plan:
        run = measure_ops(plan, OpOptions(MinTime(iterations=2)), progress=lambda *_: None)
    verdicts = {op.group.kernel.name: (op.verdict, op.reason) for op in run.ops}
    assert verdicts["addresses::release"][0] == "refused" and "cannot be repeated" in verdicts["addresses::release"][1]
    assert verdicts["addresses::apply_directly"] == ("ok", "")
    (tmp_path / "kernels.py").write_text("def release(handle):\n    return None\n")
    with (
        pytest.raises(SubstitutionRejected) as rejected,
        Plan(captured.path, substitutions=[f"addresses::release={tmp_path / 'kernels.py'}"]) as plan,
    ):
        plan.execute(verify="auto")
    assert "cannot be done twice" in str(rejected.value.report.findings)


def is_at_a_fixed_address(executable: str) -> bool:
    with open(executable, "rb") as file:
        return file.read(18)[16:] == b"\x02\x00"  # the type in an ELF header: ET_EXEC


@pytest.mark.slow
@pytest.mark.skipif(is_at_a_fixed_address(sys.executable), reason="all tests run in such a process")
def test_addresses_are_told_from_numbers_where_the_heap_is_below_4_gib() -> None:
    """As in Debian's and Ubuntu's Python, whose executable is at a fixed address with the heap behind it."""
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(python).exists() or not is_at_a_fixed_address(python):
        pytest.skip(f"{python} is not there, or at no fixed address")
    packages = f"import site, sys; site.addsitedir({sysconfig.get_path('purelib')!r})"  # in place of its own
    run = subprocess.run(
        [python, "-S", "-c", f"{packages}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"]
        + ["-q", "-p", "no:cacheprovider", "-m", "not slow", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
