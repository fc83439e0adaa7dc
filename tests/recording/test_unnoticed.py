"""The program does not notice that it is captured: what it computes, warns and raises is as without a capture."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

from replayfmt.format.codes import RecordKind

from .conftest import Capture

Program = Callable[[], Any]


def lazy_modules() -> Any:
    """An uninitialized parameter raises for its shape, and whenever it is used otherwise than it allows."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.ReLU(), torch.nn.LazyBatchNorm1d())
    y = model(torch.randn(4, 7)).sum()
    y.backward()
    return [y.item(), *(parameter.grad.sum().item() for parameter in model.parameters())]


def logging_subclass() -> Any:
    seen: list[str] = []

    class Logging(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(6.0).as_subclass(Logging).requires_grad_()
    for _ in range(3):
        ((x * 2).sum() * x).sum().backward()
    return seen, x.grad.tolist()


def traced() -> Any:
    """A convolution is traced as an operator that it calls, which PyTorch does not see under a mode."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3), torch.nn.ReLU()).eval()
    example, x = torch.ones(1, 2, 4, 4), torch.randn(1, 2, 4, 4)
    with torch.no_grad():
        return torch.jit.trace(model, example)(x).tolist()


def strict_subclass() -> Any:
    """One that refuses what it does not know, in the backward pass too, where nothing keeps it from being asked."""

    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in (torch.mul, torch.add, torch.Tensor.sum, torch.Tensor.backward, torch.Tensor.requires_grad_):
                raise RuntimeError(f"{func} is not known")
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(6.0).as_subclass(Strict).requires_grad_()
    for _ in range(3):
        torch.add(torch.mul(x, 2), x).sum().backward()
    with torch._C.DisableTorchFunctionSubclass():
        return x.grad.tolist()


def function_mode() -> Any:
    """A mode that is active while operators run: `torch.autograd.backward` takes it off for nothing."""
    seen: list[str] = []

    class Logging(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        y = (x.exp() * x).sum()
        with Logging():
            torch.autograd.backward((y,))
    return seen, x.grad.tolist()


def awkward_subclass() -> Any:
    """Attributes of its own where the recorder looks for the tensor's."""

    class Awkward(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @property
        def shape(self) -> Any:
            raise RuntimeError("no shape")

        @property
        def dtype(self) -> Any:
            return "packed"

        def untyped_storage(self) -> Any:
            raise RuntimeError("no storage")

    x = torch.ones(3).as_subclass(Awkward)
    return [torch.add(x, number).sum().item() for number in range(4)]


def own_classes() -> Any:
    """Classes of the program's own, constructed as `torch.Tensor` is."""

    class Plain(torch.Tensor):
        pass

    class Tagged(torch.Tensor):
        @staticmethod
        def __new__(cls, values: Any, tag: str) -> Any:
            made = super().__new__(cls, values)
            made.tag = tag
            return made

    class Weight(torch.nn.Parameter):
        pass

    source = torch.ones(3, requires_grad=True)
    made = [
        Plain([1.0, 2.0]),
        Plain(source),
        Plain(np.ones(2)),
        Plain(torch.ones(2).untyped_storage()),
        Tagged([3.0], "a"),
        Weight(torch.ones(2)),
        torch.Tensor([4.0]),
        torch.FloatTensor([5.0]),
    ]
    filled = Plain(2, 3).fill_(6.0)
    (made[1] * 2).sum().backward()
    with pytest.raises(TypeError):
        Plain("no tensor")
    bias = [
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3, attn_mask=mask).sum().item()
        for mask in (causal_lower_right(4, 4), causal_upper_left(4, 4))
    ]
    return [
        [(type(x).__name__, (x + 1).tolist()) for x in (*made, filled)],
        made[4].tag,
        source.grad.tolist(),
        type(Plain().data).__name__,
        bias,
    ]


def wrapped_numbers() -> Any:
    """C++ code that calls an operator that takes no numbers with a number wrapped as a tensor."""
    traced = torch.jit.trace(lambda x: x + 1.5, torch.ones(2))
    gone = torch._efficientzerotensor((2,))
    return [(x.dtype, x.tolist()) for _ in range(3) for x in (traced(torch.ones(3)), gone + 1, gone + 1.5, gone + 2j)]


PROGRAMS = [
    traced,
    wrapped_numbers,
    own_classes,
    lazy_modules,
    logging_subclass,
    strict_subclass,
    function_mode,
    awkward_subclass,
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_classes_of_the_program_see_what_they_see_without_a_capture(capture: Capture, program: Program) -> None:
    torch.manual_seed(0)
    expected = program()
    for digests in ("live", "ops"):  # with and without the hot path
        torch.manual_seed(0)
        captured = capture(program, digests=digests)
        assert captured.returned == expected
        assert captured.unsupported() == {}
    captured.replays()


def test_the_constructor_of_tensors_is_put_back(capture: Capture) -> None:
    capture(own_classes)
    assert "__new__" not in vars(torch.Tensor)
    assert torch.Tensor.__new__ is torch._C.TensorBase.__new__


class Constructed(torch.Tensor):
    @staticmethod
    def __new__(cls, source: torch.Tensor) -> Any:
        return super().__new__(cls, source)


@pytest.mark.slow
def test_dynamo_traces_the_constructor_under_a_capture_and_after_it(capture: Capture) -> None:
    if not hasattr(torch._dynamo.polyfills.tensor, "tensor_pynew"):
        pytest.skip("this Dynamo does not trace the constructor")

    def program() -> str:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: Constructed(x) + 1, fullgraph=True, backend="eager")
        return type(compiled(torch.ones(2))).__name__

    assert [capture(program).returned, program(), capture(program).returned] == ["Constructed"] * 3


def expanded() -> list[torch.Tensor]:
    """A terabyte and more of elements on some bytes: only their metadata exists."""
    far = (1_000_000, 1_000_000)
    filled = torch.empty(1)
    filled.fill_(3.0)
    wide = [
        torch.ones(1).expand(far),
        torch.arange(1000.0)[:, None].expand(1000, 10**9),
        filled.expand(far),
        torch.empty_strided(far, (0, 0)),
        torch.zeros(3).exp().expand(10**12, 3),
    ]
    assert wide[1].numpy().shape == (1000, 10**9)
    windows = torch.arange(2_000_000.0).unfold(0, 1_000_000, 1)
    return [*(tensor.t() for tensor in wide), windows, torch.arange(4.0)[:, None].expand(4, 2)]


@pytest.mark.parametrize("digests", ["live", "ops"])
def test_a_view_that_repeats_its_memory_is_digested_once(capture: Capture, digests: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture(expanded, digests=digests)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: nothing near its size
    assert captured.unsupported() == {}
    captured.replays()
    digested = {record.argument("elements") for record in captured.records(RecordKind.digest)}
    assert max(digested) == 2_000_000
    if digests == "ops":
        assert {1, 3, 1000, 8} < digested


def shown(work: Program) -> str:
    """How an exception is printed where the program catches it."""
    try:
        work()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


@torch.library.custom_op("unnoticed_tests::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("refused")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.mm(gradient, gradient)


def raising() -> list[str]:
    wide, tracked = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    inside: list[str] = []
    works: list[Program] = [
        *[lambda: torch.mm(wide, wide)] * 4,
        lambda: torch.add(wide, torch.ones(7)),
        lambda: _Backward.apply(tracked).sum().backward(),
        lambda: refuse(wide),
        lambda: tracked.numpy(),
        lambda: wide.tolist(1),
        lambda: torch.ops.aten.ones.default([-1]),
        lambda: wide.as_strided((9, 9), (9, 1)),
    ]
    thread = threading.Thread(target=lambda: inside.append(shown(works[0])))
    thread.start()
    thread.join()
    with torch.inference_mode():
        inside.append(shown(lambda: torch.matmul(wide, wide)))
    return [shown(work) for work in works] + inside


@pytest.mark.parametrize("digests", ["live", "ops"])  # with the latter every call takes the complete path
def test_an_exception_that_passes_the_recorder_is_printed_as_without_it(capture: Capture, digests: str) -> None:
    expected = raising()
    assert capture(raising, digests=digests).returned == expected


def test_what_ends_a_thread_is_shown_as_without_a_capture(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr(
        threading,
        "excepthook",
        lambda end: ends.append("".join(traceback.format_exception(end.exc_type, end.exc_value, end.exc_traceback))),
    )

    def program() -> str:
        thread = threading.Thread(target=lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)))
        thread.start()
        thread.join()
        return ends.pop()

    expected = program()
    assert capture(program).returned == expected


def test_an_exception_of_an_op_that_cannot_be_recorded_has_no_context_of_the_recorders(capture: Capture) -> None:
    def program() -> BaseException | None:
        try:
            torch.ones(2, dtype=torch.int64).fill_(2**63 + 1)
        except RuntimeError as error:
            return error.__context__
        raise AssertionError("nothing was raised")

    captured = capture(program)
    assert captured.returned is None


def warned(work: Program) -> list[tuple[str, int, str]]:
    """(file, line, begin of the text) of each warning as it is shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        work()
    return [(warning.filename, warning.lineno, str(warning.message)[:40]) for warning in caught]


def warning() -> None:
    x = torch.ones(1)
    for _ in range(4):
        x.std()  # one warning for each place in the program, not one for all
    x.std()
    torch.add(torch.ones(3), torch.ones(3), out=torch.empty(2))


def warning_once() -> None:
    """PyTorch warns of some things once in a process, unless it is told to warn always."""
    torch.set_warn_always(True)
    try:
        halves = torch.ones(6).view(torch.complex32)
        (halves.view(2, 3).t().view(torch.float32) + 1).sum().item()
        torch.ops.aten.alias.default(halves.view(2, 3).t())
        csr = torch.eye(3).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        complex_ = torch.ones(3, dtype=torch.complex64)
        for _ in range(2):
            torch.add(csr, csr)
            (nested * 2).unbind()
            quantized.dequantize()
            (complex_.conj() * 2).real.numpy()
    finally:
        torch.set_warn_always(False)


@pytest.fixture
def warnings_keep_their_place(recorder: str) -> None:
    if recorder == "python" and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        pytest.skip("from PyTorch 2.15 on, warnings name a line of this recorder (docs/exactness.md)")


@pytest.mark.usefixtures("warnings_keep_their_place")
@pytest.mark.parametrize("options", [{"digests": "ops"}, {"payload": "integers"}, {"audit": True}], ids=str)
def test_no_warning_that_comes_once_is_used_up(capture: Capture, options: dict[str, Any]) -> None:
    expected = warned(warning_once)
    assert expected
    assert capture(lambda: warned(warning_once), **options).returned == expected


@pytest.mark.usefixtures("warnings_keep_their_place")
def test_a_warning_is_shown_where_it_is_without_a_capture(capture: Capture) -> None:
    expected = warned(warning)
    assert len(expected) == 3
    assert capture(lambda: warned(warning)).returned == expected


LISTS_ITS_TENSORS = """
import gc
import sys
import threading
import numpy as np
import torch

def shapes():
    kinds = torch.UntypedStorage, torch.TypedStorage, threading.Thread
    others = sorted(type(each).__name__ for each in gc.get_objects() if issubclass(type(each), kinds))
    return sorted(tuple(each.shape) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)), others

torch.set_grad_enabled(len(sys.argv) > 1)
model = torch.nn.Linear(2, 2)
seen = []
for _ in range(3):
    x = torch.from_numpy(np.ones((4, 2), np.float32)).requires_grad_(len(sys.argv) > 1)
    y = torch.nn.functional.dropout(model(x), 0.5)
    loss = y[1:].relu().sum()
    if sys.argv[1:]:
        loss.backward()
    seen.append((shapes(), float(y.sum()), y.detach().numpy().shape, shapes()))
print([each[0] for each in seen], seen[-1][3])
"""


@pytest.mark.slow
def test_a_program_that_lists_its_tensors_storages_and_threads_finds_none_of_the_recorders(
    tmp_path: Path, recorder: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LISTS_ITS_TENSORS)
    captured = [sys.executable, "-m", "opreplay_tools.capture", f"--recorder={recorder}", "-o", str(tmp_path / "c")]
    # The recorder in Python is a dispatch mode: PyTorch makes objects of what autograd saves and of gradients for it.
    backward = ["backward"] if recorder == "native" else []

    def printed(*command: str) -> str:
        return subprocess.run([*command, str(program), *backward], check=True, capture_output=True, text=True).stdout

    assert printed(sys.executable) == printed(*captured)


WAITS_FOR_ITS_THREADS = """
import threading
import torch

for _ in range(3):
    threading.Thread(target=lambda: torch.ones(3) + 1).start()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
torch.ones(3).sum()
print(threading.enumerate() == [threading.main_thread()], threading.active_count())
"""


@pytest.mark.slow
def test_a_program_that_waits_for_every_thread_does_not_wait_for_the_recorders(tmp_path: Path, recorder: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITS_FOR_ITS_THREADS)
    captured = [sys.executable, "-m", "opreplay_tools.capture", f"--recorder={recorder}", "-o", str(tmp_path / "c")]
    done = subprocess.run([*captured, str(program)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True 1\n"
