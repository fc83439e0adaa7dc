"""The checked pass: what a replacement does otherwise than the original is found, whatever it is, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import replayfmt
from replayfmt.errors import ReplayFailed, ReplayMismatch, SubstitutionRejected
from replayfmt.replay.plan import Plan
from replayfmt.replay.substitution.distance import Tolerance
from replayfmt.replay.substitution.loading import Substitution
from replayfmt.replay.substitution.session import SubstitutionReport

from .conftest import Captured

LIBRARY = torch.library.Library("opreplay_checked", "DEF")
LIBRARY.define("quiet_write(Tensor x, Tensor y) -> Tensor")
LIBRARY.define("pair(Tensor x) -> (Tensor, Tensor[], int)")
LIBRARY.impl("quiet_write", lambda x, y: y.add_(1).mul(x), "CPU")
LIBRARY.impl("pair", lambda x: (x + 1, [x * 2, x * 3], x.numel()), "CPU")


def check(path: Path, selector: str, function: Callable[..., Any], **options: Any) -> SubstitutionReport:
    """The report; raises what the plan raises."""
    with Plan(path, substitutions=[Substitution(selector, function)], **options) as plan:
        assert plan.substitution is not None
        return plan.substitution.check()


def rejected(path: Path, selector: str, function: Callable[..., Any], **options: Any) -> SubstitutionRejected:
    with pytest.raises(SubstitutionRejected) as raised:
        check(path, selector, function, **options)
    assert raised.value.exit_code == 1
    return raised.value


def products() -> None:
    x = torch.randn(4, 6)
    for _ in range(3):
        y = torch.mm(x, torch.randn(6, 4))
        x = x + y.sum()
    torch.mm(x.t(), torch.ones(4, 2))


def test_a_right_kernel_passes_and_is_reported_by_signature(captured: Captured) -> None:
    report = check(captured(products), "aten::mm", lambda a, b: (a.double() @ b.double()).float())
    assert report.ok and report.findings == ()
    assert [(each.signature, each.calls) for each in report.checks] == [
        ("aten::mm.default(float32[4,6], float32[6,4])", 3),
        ("aten::mm.default(float32[6,4]{1,6}, float32[4,2])", 1),
    ]
    first = report.checks[0]
    assert first.distance.elements == 3 * 16 and first.kernel == "aten::mm.default" and first.faults == []
    assert all(each.telling for each in report.checks) and "equal elements" not in "".join(report.as_text())
    assert first.distance.largest_absolute is not None and first.distance.largest_absolute < 1e-3
    assert first.distance.largest_ulp is not None and first.distance.largest_relative is not None
    row = report.as_rows()[0]
    assert row["kind"] == "substitution" and row["ok"] and row["signature"] == first.signature
    assert row["largest_ulp"] == str(first.distance.largest_ulp)
    assert report.as_text()[0] == "substituted: 4 calls of 2 signatures, each checked against the original kernel"


def test_inputs_on_which_a_wrong_kernel_is_right_are_said(captured: Captured) -> None:
    """All ones: a product with rows and columns mixed up gives the same."""

    def ones() -> None:
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))

    report = check(captured(ones), "aten::mm", lambda a, b: a.t() @ b.t())
    assert report.ok and not report.checks[0].telling
    assert any("equal elements" in line for line in report.as_text()) and report.as_rows()[0]["telling"] is False


def test_values_that_are_too_far_off_are_found_and_the_first_call_named(captured: Captured) -> None:
    calls = []

    def wrong_later(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a)
        return (a @ b) * (1.01 if len(calls) > 2 else 1.0)  # the first call of a signature is made twice

    error = rejected(captured(products), "aten::mm.default(float32[4,6], *)", wrong_later)
    (finding,) = error.findings
    assert "of 48 elements are too far off, first at ordinal " in finding and "relative 0.01" in finding
    assert "ULP" in finding and ", where close is 0.001 of the value or of the root mean square" in finding


def test_tolerances_can_be_widened_and_narrowed(captured: Captured) -> None:
    path = captured(products)
    off = Substitution("aten::mm", lambda a, b: (a @ b) * 1.01)
    slightly = Substitution("aten::mm", lambda a, b: (a @ b) * 1.0001)
    for substitution, tolerance, ok in (
        (off, Tolerance(), False),
        (off, Tolerance(relative=0.02), True),
        (off, Tolerance(absolute=100.0), True),
        (slightly, Tolerance(), True),
        (slightly, Tolerance(relative=1e-6), False),
    ):
        with Plan(path, substitutions=[substitution], substitution_tolerance=tolerance) as plan:
            assert plan.substitution is not None
            if ok:
                assert plan.substitution.check().ok
            else:
                with pytest.raises(SubstitutionRejected):
                    plan.substitution.check()


def test_every_call_is_judged_on_true_inputs(captured: Captured) -> None:
    """The second product would be of the first one's wrong result if that had flowed on."""

    def chain() -> None:
        torch.mm(torch.mm(torch.full((2, 2), 3.0), torch.full((2, 2), 5.0)), torch.full((2, 2), 7.0))

    seen = []

    def wrong(a: Tensor, b: Tensor) -> Tensor:
        seen.append(float(a[0, 0]))
        return torch.mm(a, b) + 1

    rejected(captured(chain), "aten::mm", wrong)
    assert seen == [3.0, 3.0, 30.0]


def nan() -> None:
    torch.tensor([1.0, -1.0]).sqrt()
    torch.tensor([1.0, 0.0]).log()


@pytest.mark.parametrize(
    ("function", "ok"),
    [
        (lambda x: torch.tensor([1.0, float("nan")]), True),
        (lambda x: torch.tensor([1.0, 0.0]), False),
        (lambda x: torch.tensor([float("nan"), float("nan")]), False),
        (lambda x: torch.tensor([float("inf"), float("nan")]), False),
    ],
)
def test_nan_has_to_be_where_it_was(captured: Captured, function: Any, ok: bool) -> None:
    path = captured(nan)
    if ok:
        assert check(path, "aten::sqrt", function).ok
    else:
        assert "not finite on one side" in rejected(path, "aten::sqrt", function).findings[0]


def behaviours() -> None:
    x = torch.arange(6.0).view(2, 3)
    x.t()  # a view
    torch.max(x, 1)  # two results
    torch.split(x, 1)  # a list of views
    x.neg()
    torch.dropout(x, 0.5, True)
    x.add_(1)
    x.argmax()
    torch.mul(x, 2.0, out=torch.empty(2, 3))
    torch._foreach_add_([x, torch.ones(2)], 1.0)
    x[:, 1:].relu_()
    x.clone().resize_(3, 2)
    torch.empty(4, 4)
    torch.bernoulli(torch.full((4,), 0.5))
    x.sum().item()
    x.clone().unsqueeze_(0)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    def __new__(cls, tensor: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nobody has to call it")


BUFFER = torch.zeros(2, 3)
WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("aten::neg", lambda x: (-x, -x), "result 0 is a tuple of 2, the original's float32[2, 3]"),
    ("aten::neg", lambda x: None, "result 0 is None, the original's float32[2, 3]"),
    ("aten::neg", lambda x: 3.0, "result 0 is 3.0, the original's float32[2, 3]"),
    ("aten::neg", lambda x: -x.double(), "result 0 is float64[2, 3]"),
    ("aten::neg", lambda x: -x.view(3, 2), "result 0 is float32[3, 2]"),
    ("aten::neg", lambda x: (-x).t().contiguous().t(), "with strides [1, 2] on cpu, the original's float32[2, 3]"),
    ("aten::neg", lambda x: torch.cat([x, -x])[2:], "at offset 6 on cpu, the original's"),
    ("aten::neg", lambda x: torch.empty(2, 3, device="meta"), "on meta, the original's"),
    ("aten::neg", Wrapper, "result 0 is a Wrapper, the original's float32[2, 3]"),
    ("aten::neg", lambda x: x.neg_(), "result 0 is on argument memory 0, the original's on new memory 1"),
    ("aten::neg", lambda x: x, "result 0 is on argument memory 0"),
    ("aten::neg", lambda x: (x.mul_(2), -x / 2)[1], "writes argument self, which the original does not write"),
    ("aten::neg", lambda x: BUFFER.copy_(-x), "returns the same memory from two calls"),
    ("aten::neg", lambda x: (torch.rand(1), -x)[1], "leaves a random generator in a different state"),
    (
        "aten::clone",
        lambda x, *, memory_format=None: torch.from_numpy(x.numpy()),
        "result 0 is on argument memory 0, the original's on new memory 1",
    ),
    ("aten::t", lambda x: x.t().contiguous(), "with strides [2, 1] on cpu, the original's"),
    ("aten::t", lambda x: x.clone().t(), "result 0 is on new memory 1, the original's on argument memory 0"),
    ("aten::max.dim", lambda x, dim, keepdim=False: torch.max(x, dim)[::-1], "result 0 is int64[2]"),
    ("aten::max.dim", lambda x, dim, keepdim=False: [x.max(dim)[0]], "returns 1 results, the original 2 results"),
    ("aten::max.dim", lambda x, dim, keepdim=False: (x.max(dim)[0], x.max(dim)[1] + 1), "too far off"),
    ("aten::split.Tensor", lambda x, size, dim=0: x.split(size)[:1], "result 0 is a tuple of 1, the original's a "),
    ("aten::split.Tensor", lambda x, size, dim=0: [x[:1].clone(), x[1:]], "result 0[0] is on new memory 1"),
    ("aten::add_.Tensor", lambda x, other, *, alpha=1: x + other, "result 0 is on new memory 1"),
    ("aten::add_.Tensor", lambda x, other, *, alpha=1: x.add_(2 * other), "result 0: element ["),
    ("aten::add_.Tensor", lambda x, other, *, alpha=1: x, "result 0: element ["),
    ("aten::mul.out", lambda x, other, *, out: x * 2, "result 0 is on new memory 1"),
    ("aten::mul.out", lambda x, other, *, out: (torch.mul(x, 2, out=out), x.add_(1))[0], "writes argument self"),
    ("aten::_foreach_add_.Scalar", lambda xs, s: (xs[0].add_(s), None)[1], "argument self[1]: element ["),
    ("aten::relu_", lambda x: (x._base if x._base is not None else x).relu_(), ""),
    ("aten::dropout", lambda x, p, train: x, ""),
    ("aten::bernoulli", lambda x, *, generator=None: torch.zeros(4), "leaves a random generator in a different state"),
    ("aten::argmax", lambda x, dim=None, keepdim=False: torch.tensor(0), "1 of 1 elements are too far off"),
    ("aten::_local_scalar_dense", lambda x: float(x) + 1, "result 0: expected "),
    ("aten::_local_scalar_dense", lambda x: int(x), "the original's"),
    ("aten::resize_", lambda x, size, *, memory_format=None: x, "result 0 is float32[2, 3]"),
    ("aten::unsqueeze_", lambda x, dim: x.unsqueeze(dim), "leaves argument self as float32[2, 3]"),
]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("behaviours") / "capture.opreplay"
    with replayfmt.capture(path, digests="none"):
        behaviours()
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selector", "function", "said"),
    [case for case in WRONG if case[2]],
    ids=[f"{selector}: {said}" for selector, _function, said in WRONG if said],
)
def test_what_is_done_otherwise_is_found(many: Path, selector: str, function: Callable[..., Any], said: str) -> None:
    error = rejected(many, selector, function)
    assert any(said in finding for finding in error.findings), error.findings
    assert all(finding.startswith(getattr(function, "__name__", "")) for finding in error.findings)


RIGHT: list[tuple[str, Callable[..., Any]]] = [
    ("aten::neg", lambda x: x * -1),
    ("aten::t", lambda x: x.transpose(0, 1)),
    ("aten::max.dim", lambda x, dim, keepdim=False: (x.amax(dim), x.argmax(dim))),
    ("aten::split.Tensor", lambda x, size, dim=0: [x[:1], x[1:]]),
    ("aten::add_.Tensor", lambda x, other, *, alpha=1: x.copy_(x + other)),
    ("aten::mul.out", lambda x, other, *, out: out.copy_(x + x)),
    ("aten::_foreach_add_.Scalar", lambda xs, s: [x.add_(s) for x in xs] and None),
    ("aten::relu_", lambda x: x.clamp_(min=0)),
    ("aten::empty.memory_format", lambda size, **_rest: torch.full(size, 7.0)),
    ("aten::bernoulli", lambda x, *, generator=None: torch.ops.aten.bernoulli(x, generator=generator)),
    ("aten::_local_scalar_dense", lambda x: x.tolist()),
    ("aten::resize_", lambda x, size, *, memory_format=None: x.resize_(size)),
    ("aten::unsqueeze_", lambda x, dim: x.unsqueeze_(dim)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("selector", "function"), RIGHT, ids=[selector for selector, _function in RIGHT])
def test_another_way_to_do_the_same_passes_and_runs(many: Path, selector: str, function: Callable[..., Any]) -> None:
    with Plan(many, substitutions=[Substitution(selector, function)]) as plan:
        result = plan.execute()
        assert result.outcome == "ok"
        assert plan.substitution is not None and plan.substitution.report is not None and plan.substitution.report.ok


def test_memory_beside_a_written_view_must_stay_as_it_is(captured: Captured) -> None:
    base = torch.arange(-6.0, 6.0).view(3, 4)

    def program() -> None:
        base[:, 1:3].relu_()

    def too_much(x: Tensor) -> Tensor:
        whole = torch.empty(0).set_(x.untyped_storage(), 0, (12,), (1,))
        whole.relu_()
        return x

    path = captured(program)
    assert "writes memory beside argument self" in rejected(path, "aten::relu_", too_much).findings[0]
    assert check(path, "aten::relu_", lambda x: x.clamp_(min=0)).ok


def test_arguments_that_share_memory_share_their_copies(captured: Captured) -> None:
    base = torch.arange(8.0)

    def program() -> None:
        base[:4].add_(base[4:])

    def elementwise(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
        assert x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        return x.copy_(x + other)

    assert check(captured(program), "aten::add_.Tensor", elementwise).ok


def test_what_a_custom_operator_writes_without_saying_so_is_judged_as_well(captured: Captured) -> None:
    def program() -> None:
        torch.ops.opreplay_checked.quiet_write(torch.ones(3), torch.arange(3.0))

    selector = "opreplay_checked::quiet_write"
    path = captured(program, whole=[selector])
    assert check(path, selector, lambda x, y: y.copy_(y + 1) * x).ok
    assert "argument y: element [" in rejected(path, selector, lambda x, y: (y + 1) * x).findings[0]
    wrong = rejected(path, selector, lambda x, y: (y.copy_(y + 1) * x, x.add_(1))[0])
    assert "writes argument x, which the original does not write" in wrong.findings[0]


def test_results_of_several_kinds_are_compared_one_by_one(captured: Captured) -> None:
    path = captured(lambda: torch.ops.opreplay_checked.pair(torch.ones(2)))
    selector = "opreplay_checked::pair"
    assert check(path, selector, lambda x: (x + 1, [x + x, 3 * x], 2)).ok
    assert "result 1[1]: element [" in rejected(path, selector, lambda x: (x + 1, [x * 2, x * 4], 2)).findings[0]
    another = rejected(path, selector, lambda x: (x + 1, [x * 2, x * 3], 3))
    assert "result 2 is 3, the original's 2" in another.findings[0]
    assert "result 1 is a list of 1" in rejected(path, selector, lambda x: (x + 1, [x * 2], 2)).findings[0]


def test_sparse_and_quantized_tensors_are_compared_by_their_parts(captured: Captured) -> None:
    def program() -> None:
        torch.eye(3).to_sparse().mul(2.0)

    path = captured(program)
    selector = next(f"{kernel.qualified_name}" for kernel in _kernels(path) if "mul" in kernel.name)
    overload = torch.ops.aten.mul.Tensor if selector == "aten::mul.Tensor" else torch.ops.aten.mul.Scalar
    assert check(path, selector, lambda x, y: overload(x, y)).ok
    assert "too far off" in rejected(path, selector, lambda x, y: overload(overload(x, y), y)).findings[0]
    assert "result 0 is" in rejected(path, selector, lambda x, y: overload(x, y).to_dense()).findings[0]


def _kernels(path: Path) -> Any:
    with replayfmt.open(path) as capture:
        return capture.kernels


def test_random_kernels_begin_with_the_state_the_original_began_with(captured: Captured) -> None:
    def program() -> None:
        torch.rand(3)
        torch.bernoulli(torch.full((4,), 0.5)).sum().item()
        torch.rand(3)

    def same(x: Tensor, *, generator: Any = None) -> Tensor:
        return torch.ops.aten.bernoulli.default(x.clone())

    path = captured(program)
    with Plan(path, substitutions=[Substitution("aten::bernoulli", same)]) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_settings_that_a_replacement_leaves_changed_are_found(captured: Captured) -> None:
    def slow(a: Tensor, b: Tensor) -> Tensor:
        torch.set_num_threads(2)
        return torch.matmul(a, b)

    error = rejected(captured(products), "aten::mm", slow)
    assert "changes the settings num_threads" in error.findings[0]


def test_an_exception_is_one_error_with_ordinal_op_function_and_line(captured: Captured) -> None:
    def refuses(a: Tensor, b: Tensor) -> Tensor:
        raise ValueError("not this shape\nreally")

    path = captured(products)
    with Plan(path, substitutions=[Substitution("aten::mm", refuses)]) as plan, pytest.raises(ReplayFailed) as raised:
        plan.execute()
    line = refuses.__code__.co_firstlineno + 1
    message = str(raised.value)
    assert message.startswith(f"{path}: ordinal ") and "(aten::mm.default)" in message
    assert f"the replacement refuses failed at {__file__}:{line}: ValueError: not this shape" in message
    assert "\n" not in message


def test_an_exception_after_the_check_is_the_same_error(captured: Captured) -> None:
    calls = []

    def tires(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a)
        if len(calls) > 6:
            raise RuntimeError("enough")
        return torch.matmul(a, b)

    path = captured(products)
    with Plan(path, substitutions=[Substitution("aten::mm", tires)]) as plan, pytest.raises(ReplayFailed) as raised:
        plan.execute()
    assert len(calls) == 7  # four calls of two signatures, checked, and the first of the run
    assert "the replacement tires failed at " in str(raised.value) and "RuntimeError: enough" in str(raised.value)


def test_where_the_originals_differ_from_the_capture_no_replacement_is_blamed(captured: Captured) -> None:
    def program() -> None:
        torch.ones(2).add_(0.0).sum().item()

    path = captured(program)
    original = torch.ops.aten.sum.default
    with Plan(path, substitutions=[Substitution("aten::add_", lambda x, o, *, alpha=1: x.copy_(x + o))]) as plan:
        from replayfmt.replay.codegen.call_templates import DirectFunctions

        plan.context.direct._by_signature.update(
            {
                number: lambda x: original(x) * 2
                for number, signature in enumerate(plan.reader.signatures)
                if signature is not None
                and signature.kernel
                and plan.reader.kernels[signature.kernel].name == "aten::sum"
            }
        )
        assert isinstance(plan.context.direct, DirectFunctions)
        with pytest.raises(ReplayMismatch, match="no replacement could be judged, because the original kernels differ"):
            plan.execute()


def test_ops_that_raised_under_capture_keep_the_captured_kernel(captured: Captured) -> None:
    def program() -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 2), torch.ones(3, 2))

    with Plan(captured(program), substitutions=[Substitution("aten::mm", lambda a, b: torch.matmul(a, b))]) as plan:
        assert plan.execute().outcome == "ok"
        assert plan.substitution is not None and plan.substitution.report is not None
        assert [each.calls for each in plan.substitution.report.checks] == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64])
def test_every_dtype_is_judged_by_its_own_tolerance(captured: Captured, dtype: torch.dtype) -> None:
    path = captured(lambda: torch.ones(4, dtype=dtype).mul(3))
    assert check(path, "aten::mul.Tensor", lambda x, y: x + x + x).ok
    finding = rejected(path, "aten::mul.Tensor", lambda x, y: x + x + x + x).findings[0]
    assert "4 of 4 elements are too far off" in finding
    assert ("exactly equal" in finding) == (dtype is torch.int64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_an_accelerator_are_checked_there(captured: Captured) -> None:
    def program() -> None:
        x = torch.randn(64, 64, device="cuda")
        torch.mm(x, x.t()).sum().item()

    path = captured(program)
    assert check(path, "aten::mm", lambda a, b: torch.matmul(a, b)).ok
    assert "too far off" in rejected(path, "aten::mm", lambda a, b: torch.matmul(a, b) * 1.1).findings[0]
    assert "on cpu, the original's" in rejected(path, "aten::mm", lambda a, b: torch.matmul(a, b).cpu()).findings[0]


def test_tensors_without_elements_or_memory_are_arguments_like_others(captured: Captured) -> None:
    def program() -> None:
        torch.cat([torch.empty(0), torch.ones(2)])
        torch.ones(0, 3).neg()

    path = captured(program)
    assert check(path, "aten::cat", lambda tensors, dim=0: torch.cat(list(tensors), dim)).ok
    assert check(path, "aten::neg", lambda x: x * -1).ok
    assert "result 0 is float32[3, 0]" in rejected(path, "aten::neg", lambda x: x.t().neg()).findings[0]


@pytest.mark.slow
def test_what_a_mask_is_filled_with_does_not_make_the_other_values_close(captured: Captured) -> None:
    masked = torch.ones(16, 16).triu(1).bool()

    def wrong(self: Tensor, mask: Tensor, value: float) -> Tensor:
        return torch.where(mask, value, self * 5 + 3)

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        least = torch.finfo(dtype).min

        def scores(dtype: torch.dtype = dtype, least: float = least) -> None:
            torch.randn(16, 16, dtype=dtype).masked_fill(masked, least)

        path = captured(scores, str(dtype), digests="none")
        assert "too far off" in rejected(path, "aten::masked_fill", wrong).findings[0]
        assert check(
            path, "aten::masked_fill", lambda self, mask, value: torch.where(mask, value, self * (1 + 1e-8))
        ).ok
