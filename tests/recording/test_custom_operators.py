"""Operators of other packages are recorded as the kernels that they are, however they were registered."""

from __future__ import annotations

import ctypes
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stable_library import build, needs_compiler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from unseen import write_unseen

import replayfmt
from replayfmt.format.codes import RecordKind

from .conftest import Capture, Captured

# Operators without a dispatch key: `store` and `twice` do their work themselves, `blend` has PyTorch do it.
SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;

void store(const Tensor& x, const Tensor& out) {
    const float* from = static_cast<const float*>(x.data_ptr());
    float* to = static_cast<float*>(out.data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
}
Tensor twice(const Tensor& x) {
    Tensor out = torch::stable::empty_like(x);
    store(x, out);
    return out;
}
Tensor blend(const Tensor& x, const Tensor& weight) {
    return torch::stable::matmul(torch::stable::matmul(x, weight), weight);
}

STABLE_TORCH_LIBRARY(opreplay_whole, m) {
    m.def("store(Tensor x, Tensor(a!) out) -> ()");
    m.def("twice(Tensor x) -> Tensor");
    m.def("blend(Tensor x, Tensor weight) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(opreplay_whole, CompositeImplicitAutograd, m) {
    m.impl("store", TORCH_BOX(&store));
    m.impl("twice", TORCH_BOX(&twice));
    m.impl("blend", TORCH_BOX(&blend));
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("whole"), SOURCE)


@pytest.fixture
def loaded(built: Path) -> Any:
    torch.ops.load_library(built)
    return torch.ops.opreplay_whole


def own_ops(captured: Captured) -> list[str]:
    return [op for op in captured.ops() if not op.startswith("aten::")]


@pytest.mark.slow
@needs_compiler
def test_a_library_that_is_loaded_while_the_capture_runs_is_noticed(capture: Capture, built: Path) -> None:
    """The first of these tests, so that the library is new."""

    def program() -> Any:
        x = torch.arange(4.0)
        torch.ops.load_library(built)
        return torch.ops.opreplay_whole.twice(x) + 1

    captured = capture(program, digests="ops")
    assert captured.returned.tolist() == [1, 3, 5, 7]
    assert own_ops(captured) == ["opreplay_whole::twice.default"] and captured.unsupported() == {}
    captured.replays()


@needs_compiler
@pytest.mark.parametrize("inference", [False, True])
def test_operators_without_a_dispatch_key_are_recorded_whole(capture: Capture, loaded: Any, inference: bool) -> None:
    scripted = torch.jit.script(_scripted)  # a caller in C++

    def program() -> Any:
        with torch.inference_mode(inference):
            x, out = torch.arange(4.0), torch.empty(4)
            loaded.store(x, out)
            loaded.store.default(out, x)
            return out, loaded.twice(x), scripted(x), torch.vmap(loaded.twice)(x.view(2, 2))

    expected = [[0, 2, 4, 6], [0, 8, 16, 24], [0, 8, 16, 24], [[0, 8], [16, 24]]]
    captured = capture(program, digests="ops")
    assert [tensor.tolist() for tensor in captured.returned] == expected
    assert [op.split("::")[1] for op in own_ops(captured)] == ["store.default"] * 2 + ["twice.default"] * 4
    assert captured.unsupported() == {}
    captured.replays()


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.opreplay_whole.twice(x)


@needs_compiler
def test_gradients_through_the_parts_of_a_whole_composite_are_what_they_are(capture: Capture, loaded: Any) -> None:
    x, weight = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)

    def program() -> Any:
        first = torch.autograd.grad(loaded.blend(x, weight).sum(), weight)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = torch.autograd.grad(loaded.blend(x, weight).float().sum(), weight)[0]
        transformed = torch.func.grad(lambda w: loaded.blend(x, w).sum())(weight.detach())
        return first, second, transformed

    expected = program()
    captured = capture(program, digests="ops")
    assert all(map(torch.equal, captured.returned, expected)) and not torch.equal(expected[0], expected[1])
    assert own_ops(captured) == ["opreplay_whole::blend.default"] * 2, "a transform sees the parts"
    captured.replays()


@needs_compiler
def test_nothing_is_left_of_the_capture_in_the_dispatcher(capture: Capture, loaded: Any) -> None:
    registered = functools.partial(torch._C._dispatch_dump, "opreplay_whole::twice")
    before = registered()
    during = capture(lambda: (loaded.twice(torch.ones(1)), registered())).returned[1]
    assert "AutogradCPU" in during and "AutogradCPU" not in before
    assert registered() == before


@needs_compiler
def test_modes_and_tensors_of_the_programs_see_the_parts_as_without_a_capture(capture: Capture, loaded: Any) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    seen: list[str] = []

    class Logging(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    def program() -> Any:
        x = torch.ones(2, 2)
        with Logging():
            plain = loaded.blend(x, x)
        return plain, loaded.blend(TwoTensor(x, x * 2), TwoTensor(x, x)).b

    program()
    expected = list(seen)
    seen.clear()
    captured = capture(program)
    assert seen == expected and "aten::mm" in seen
    assert own_ops(captured) == [] and captured.unsupported() == {}
    captured.replays()


@needs_compiler
def test_work_that_passed_the_recorder_by_is_named(capture: Capture, loaded: Any) -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def program() -> Any:
        x, out = torch.arange(3.0), torch.zeros(3)
        with Passing():  # what a mode of the program's lies above comes in parts
            loaded.store(x, out)
        return out * 2

    captured = capture(program, digests="ops")
    assert captured.returned.tolist() == [0, 4, 8]
    assert captured.unsupported() == {"unseen_work": 1}
    (record,) = captured.records(RecordKind.unsupported)
    assert record.argument("op") == "opreplay_whole::store"
    assert [r.argument("reason") for r in captured.records(RecordKind.storage_import)] == ["outside_write"]


_library = torch.library.Library("opreplay_custom", "DEF")
_library.define("half(Tensor x) -> Tensor")
_library.impl("half", lambda x: x * 0.5)  # composite, in Python
_library.define("third(Tensor x) -> Tensor")
_library.impl("third", lambda x: x / 3, "CPU")  # no kernel for gradients: those of its parts
_library.define("raw(Tensor x) -> Tensor")
_library.define("hidden(Tensor x) -> Tensor")
_library.define("visible(Tensor x, Tensor(a!) out) -> ()")
_library.impl("visible", lambda x, out: [out.copy_(x * 2)].clear(), "AutogradCPU")


def raw(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


def hidden(x: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return x.detach() * 2


_library.define("quiet(Tensor x, Tensor y) -> Tensor")
_library.define("same(Tensor x) -> Tensor")
_library.define("declared(Tensor(a) x) -> Tensor(a)")
_library.impl("quiet", lambda x, y: x * y.add_(1), "CPU")
_library.impl("same", lambda x: x, "CPU")
_library.impl("declared", lambda x: x[1:], "CPU")
_library.impl("raw", raw, "AutogradCPU")
_library.impl("hidden", hidden, "AutogradCPU")


@torch.library.custom_op("opreplay_custom::shift", mutates_args=("out",))
def shift(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("name", ["half", "third"])
def test_operators_from_python_keep_their_gradients(capture: Capture, name: str) -> None:
    def program() -> Any:
        x = torch.ones(3, requires_grad=True)
        getattr(torch.ops.opreplay_custom, name)(x).sum().backward()
        return x.grad

    expected = program()
    captured = capture(program, digests="ops")
    assert torch.equal(captured.returned, expected)
    assert own_ops(captured) == [f"opreplay_custom::{name}.default"]
    captured.replays()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_so_they_do_where_recording_has_not_begun_or_is_over(capture: Capture) -> None:
    def program() -> Any:
        gradients = []
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            torch.ops.opreplay_custom.third(x).sum().backward()
            gradients.append(x.grad)
        return gradients

    expected = program()
    captured = capture(program, start_op=9, stop_op=11)
    assert all(map(torch.equal, captured.returned, expected))
    assert 1 <= len(captured.ops()) <= 2


@pytest.mark.parametrize("name", ["raw", "hidden"])
def test_a_kernel_above_dispatch_modes_that_does_the_work_itself_is_named(
    capture: Capture, name: str, recorder: str
) -> None:
    captured = capture(lambda: getattr(torch.ops.opreplay_custom, name)(torch.ones(1)))
    if (name, recorder) == ("hidden", "native"):  # from a dispatch mode alone
        assert captured.unsupported() == {} and "aten::mul.Tensor" in captured.ops()
    else:
        assert captured.unsupported() == {"unseen_work": 1}


def test_one_whose_parts_are_recorded_is_not(capture: Capture) -> None:
    def program() -> Any:
        x, out = torch.ones(3), torch.empty(3)
        for _ in range(4):  # the last ones on the hot path
            torch.ops.opreplay_custom.visible(x, out)
        return out

    for digests in ("live", "none"):
        captured = capture(program, digests=digests)
        assert captured.unsupported() == {} and captured.ops().count("aten::copy_.default") == 4


@pytest.mark.parametrize("payload", ["full", "integers", "none"])
def test_memory_that_nobody_wrote_may_be_given_to_what_declares_that_it_writes_it(
    capture: Capture, payload: str
) -> None:
    def program() -> Any:
        x, out = torch.ones(3), torch.empty(3)
        shift(x, out)
        return out * 2

    captured = capture(program, payload=payload)
    assert captured.unsupported() == {}
    reasons = [r.argument("reason") for r in captured.records(RecordKind.storage_import)]
    assert reasons == ([] if payload == "none" else ["written_argument"])
    with replayfmt.Plan(captured.path) as plan:
        result = plan.execute(verify="bitwise" if payload == "full" else "none")
    assert result.outcome == "ok"


def test_memory_that_is_written_by_what_is_no_operator_is_an_unseen_write(capture: Capture) -> None:
    def program() -> Any:
        out = torch.empty(3)
        write_unseen(out)
        return out + 1

    assert capture(program).unsupported() == {"unseen_write": 1}


@pytest.mark.parametrize("key", ["", "CPU", "AutogradCPU"])
def test_an_exception_of_an_operator_is_printed_as_without_a_capture(capture: Capture, key: str) -> None:
    with torch.library._scoped_library("opreplay_raising", "DEF") as library:
        library.define("fail(Tensor x) -> Tensor")
        library.impl("fail", _fail, key)

        def program() -> list[str]:
            printed = []
            calls: list[Callable[[], Any]] = [
                lambda: torch.ops.opreplay_raising.fail(torch.ones(1)),
                lambda: torch.ops.opreplay_raising.fail.default(torch.ones(1)),
                lambda: torch.ops.opreplay_raising.fail(1, 2),
                lambda: torch.ops.opreplay_raising.nothing,
            ]
            for call in calls:
                try:
                    call()
                except Exception:
                    printed.append(traceback.format_exc())
            return printed

        expected = program()
        assert len(expected) == 4 and capture(program).returned == expected


def test_what_tells_how_a_library_was_built_is_no_op(capture: Capture) -> None:
    """torchvision and others ask for it when they are imported: a replay of a program that uses none of their operators
    needs them as little."""
    with torch.library._scoped_library("opreplay_built", "DEF") as library:
        for name, result in (("_cuda_version", "int"), ("is_rir_available", "bool"), ("next_number", "int")):
            library.define(f"{name}() -> {result}")
            library.impl(name, lambda: 1, "CompositeExplicitAutograd")
        library.define("version(Tensor x) -> int")
        library.impl("version", lambda x: x.numel(), "CPU")
        ops = torch.ops.opreplay_built

        def program() -> tuple[int, ...]:
            x = torch.ones(3)
            return ops._cuda_version(), ops.is_rir_available.default(), ops.next_number(), ops.version(x + 1)

        captured = capture(program, whole=("opreplay_built::*",))
        assert captured.returned == (1, 1, 1, 3) and captured.unsupported() == {}
        own = [name for name in captured.ops() if name.startswith("opreplay_built")]
        assert own == ["opreplay_built::next_number.default", "opreplay_built::version.default"]


def _fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"not with {x.numel()} elements")


def test_pytorchs_composites_that_write_through_addresses_are_recorded_whole(capture: Capture) -> None:
    def program() -> torch.Tensor:
        engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
        first = engine.draw(5)
        engine.fast_forward(3)
        return torch.cat((first, engine.draw(2)))

    captured = capture(program)
    assert captured.unsupported() == {}
    assert {"aten::_sobol_engine_draw.default", "aten::_sobol_engine_ff_.default"} <= set(captured.ops())
    captured.replays()
    assert torch.equal(captured.returned, program())


def test_a_write_to_what_an_operator_made_of_an_array_is_no_write_to_an_argument(
    capture: Capture, tmp_path: Any
) -> None:
    with torch.library._scoped_library("opreplay_lifting", "DEF") as library:
        library.define("fill(Tensor x) -> Tensor")
        library.impl("fill", lambda x: torch.tensor([1.0, 2.0]).add_(x), "CPU")
        with replayfmt.capture(tmp_path / "c.opreplay") as recorder:
            torch.ops.opreplay_lifting.fill(torch.ones(2))
        assert recorder.notes() == []


def test_a_library_that_cannot_be_registered_fails_without_frames_of_the_recorder(tmp_path: Any) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay"):
        torch.ones(2) + 1
        with pytest.raises(OSError) as caught:
            torch.ops.load_library(str(tmp_path / "missing.so"))
    frames = [entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert not [name for name in frames if "replayfmt" in name]


def test_writes_and_aliases_that_a_schema_does_not_declare_are_told_once_at_the_end(tmp_path: Any) -> None:
    custom = torch.ops.opreplay_custom
    with replayfmt.capture(tmp_path / "c.opreplay") as recorder:
        x, y = torch.ones(3), torch.zeros(3)
        for _ in range(3):
            custom.quiet(x, y)
            custom.same(x).add_(1)
            custom.declared(x)
    quiet, same = sorted(recorder.notes())
    assert quiet.startswith("opreplay_custom::quiet writes its argument 'y', which its schema does not declare")
    assert same.startswith("opreplay_custom::same returns the memory of its argument 'x', which its schema does not")
