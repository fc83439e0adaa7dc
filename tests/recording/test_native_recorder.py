"""The recorder beneath autograd: the program's results are those that it has without a capture."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch

from replayfmt.format.codes import OpStatus, RecordKind

from .conftest import Capture

pytestmark = pytest.mark.recorder("native")


def gradients(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> list[torch.Tensor]:
    given = [value.clone().requires_grad_() for value in values]
    result = function(*given)
    return list(torch.autograd.grad(result.sum(), given))


def autocast(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


def second_gradient() -> torch.Tensor:
    x = torch.tensor([0.0, 2.0, 3.0], requires_grad=True)
    (first,) = torch.autograd.grad(x.cumprod(0).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def of_seed(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


# Each gives something else under a dispatch mode that does nothing.
CHANGED_BY_MODES: dict[str, Callable[[], Any]] = {
    "affine_grid": lambda: autocast(lambda: functional.affine_grid(of_seed(2, 2, 3), [2, 1, 4, 4])),
    "pinv": lambda: autocast(lambda: torch.linalg.pinv(of_seed(4, 3))),
    "bilinear": lambda: autocast(lambda: functional.bilinear(of_seed(2, 3), of_seed(2, 4), of_seed(5, 3, 4))),
    "matmul": lambda: of_seed(2, 3, 3) @ of_seed(1, 3, 3),
    "prod": lambda: gradients(torch.prod, of_seed(7)),
    "max": lambda: gradients(torch.max, -of_seed(3, 4)),
    "cumprod": second_gradient,
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    bits = [value.detach().contiguous().view(torch.uint8) for value in (one, other)]
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(*bits)


@pytest.mark.parametrize("name", CHANGED_BY_MODES)
def test_what_a_dispatch_mode_changes_stays_as_it_is(capture: Capture, name: str) -> None:
    program = CHANGED_BY_MODES[name]
    expected = program()
    captured = capture(program, digests="ops")
    assert same(captured.returned, expected)
    assert captured.reader.session.policies["recorder"] == "native"
    assert "exactness" not in captured.reader.session.policies
    assert not captured.unsupported()
    captured.replays()


def test_composites_come_in_parts_in_inference_mode(capture: Capture) -> None:
    x = torch.ones(2, 2)

    def program() -> torch.Tensor:
        with torch.inference_mode():
            return functional.linear(x, x, x[0])

    captured = capture(program)
    assert "aten::linear.default" not in captured.ops() and "aten::addmm.default" in captured.ops()
    captured.replays()


def test_results_get_no_python_object_of_the_recorders(capture: Capture) -> None:
    """A subclass could not be made of them then."""

    class Old(torch.Tensor):
        pass

    def program() -> list[torch.Tensor]:
        return [Old([1.0]) + 1, torch.ones(2).as_subclass(Old) * 2, torch.nn.Parameter(torch.ones(2))]

    captured = capture(program)
    assert [type(value) for value in captured.returned] == [Old, Old, torch.nn.Parameter]
    captured.replays()


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_can_be_made_of_any_layout(capture: Capture, layout: str) -> None:
    """PyTorch refuses it for a tensor that has a Python object."""

    def program() -> torch.Tensor:
        return torch.nn.Parameter(LAYOUTS[layout](), requires_grad=False)

    captured = capture(program)
    assert type(captured.returned) is torch.nn.Parameter
    captured.replays()


@pytest.mark.slow
def test_a_warning_that_comes_once_is_not_used_up() -> None:
    """Tensors in CSR layout warn when the first of a process is made."""
    program = (
        "import torch, replayfmt, sys, warnings\n"
        "x = torch.eye(3)\n"
        "with replayfmt.capture(sys.argv[1], recorder='native', force=True):\n"
        "    y = torch.ones(3, 3) @ x\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        warnings.simplefilter('always')\n"
        "        z = x.to_sparse_csr() @ y\n"
        "print(sum('Sparse CSR' in str(each.message) for each in caught))\n"
    )
    with tempfile.NamedTemporaryFile(suffix=".opreplay") as file:
        done = subprocess.run([sys.executable, "-c", program, file.name], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_an_error_is_the_one_without_a_capture(capture: Capture) -> None:
    def program() -> tuple[str, str]:
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            return str(error), "".join(traceback.format_tb(error.__traceback__))
        raise AssertionError("it did not raise")

    expected = program()
    captured = capture(program, digests="ops")
    assert captured.returned == expected
    reader = captured.reader
    raised = [
        reader.kernels[r.signature.kernel].name
        for r in captured.records(RecordKind.op)
        if r.signature.status is OpStatus.raised
    ]
    assert raised == ["aten::dot"]
    captured.replays()


def test_higher_order_operators_run_as_without_a_capture(capture: Capture) -> None:
    from torch._higher_order_ops.flat_apply import flat_apply  # noqa: F401 - one that is imported before
    from torch._higher_order_ops.out_dtype import out_dtype

    x = torch.ones(2, 2, dtype=torch.int8)

    def program() -> torch.Tensor:
        return out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)

    expected = program()
    captured = capture(program)
    assert torch.equal(captured.returned, expected) and "aten::mm.default" in captured.ops()
    captured.replays()


def test_threads_and_their_backward_passes_take_part(capture: Capture) -> None:
    def work(results: list[torch.Tensor]) -> None:
        x = torch.ones(3, requires_grad=True)
        (x.sin() * 2).sum().backward()
        assert x.grad is not None
        results.append(x.grad)

    def program() -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        threads = [threading.Thread(target=work, args=(results,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    captured = capture(program)
    assert captured.ops().count("aten::sin.default") == 3 and captured.ops().count("aten::cos.default") == 3
    assert not captured.unsupported()
    captured.replays()


def test_a_capture_without_the_hook_after_one_with_it_sees_nothing_twice(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = capture(lambda: torch.ones(2) + 1)
    monkeypatch.setenv("OPREPLAY_RECORDER", "python")
    second = capture(lambda: torch.ones(2) + 1)
    assert first.ops() == second.ops() == ["aten::ones.default", "aten::add.Tensor"]
    assert second.reader.session.policies["recorder"] == "python"
    assert "may differ" in second.reader.session.policies["exactness"]
    assert torch.equal(first.returned, second.returned)


def test_what_prints_is_recorded_too(capture: Capture) -> None:
    captured = capture(lambda: repr(torch.ones(2)))
    assert len(captured.ops()) > 1


class RunsOnItself(torch.Tensor):
    """Operators get the tensor itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_dispatch():
            return func(*args, **(kwargs or {}))


def test_work_under_the_keys_of_an_earlier_moment_is_recorded(capture: Capture) -> None:
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    x = torch.arange(3.0)

    def program() -> list[torch.Tensor]:
        results = []
        for _ in range(3):
            with torch._C._ForceDispatchKeyGuard(*keys):
                results.append(x.mul_(2).clone())
        return results

    captured = capture(program)
    assert captured.ops() == ["aten::mul_.Tensor", "aten::clone.default"] * 3
    assert not captured.unsupported()
    captured.replays()


def test_a_tensor_that_runs_operators_on_itself_is_recorded(capture: Capture) -> None:
    x = torch.Tensor._make_subclass(RunsOnItself, torch.arange(3.0))
    captured = capture(lambda: [x * 2 for _ in range(3)])
    assert [each.tolist() for each in captured.returned] == [[0.0, 2.0, 4.0]] * 3
    assert captured.ops() == ["aten::mul.Tensor"] * 3
    assert not captured.unsupported()
    captured.replays()


def test_what_makes_fake_tensors_is_no_work(capture: Capture) -> None:
    x = torch.ones(3)

    def program() -> torch.Tensor:
        for _ in range(3):
            with FakeTensorMode() as fake:
                fake.from_tensor(x) * 2
        return x + 1

    assert capture(program).ops() == ["aten::add.Tensor"]
