"""What a comparison says of real captures: which op, on which inputs, how far, and what it cannot know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from format.reseal import change_records

import replayfmt
import replayfmt.compare
from replayfmt.compare.comparison import NotComparable
from replayfmt.errors import ReplayMismatch, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.synthesis import ImportedSession, imported_session

from .models import FAULT, captured, gelu

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A capture of what a function does."""

    def make(name: str, program: Callable[[], object], **options: object) -> Path:
        path = tmp_path / f"{name}.opreplay"
        with replayfmt.capture(path, **{"digests": "ops", **options}):
            program()
        return path

    return make


def chain(scale: float = 2.0, extra: bool = False) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    y = x.mul(scale) if not extra else x.mul(scale).neg().neg()
    y.add(1).exp().sum().item()


def test_the_first_divergence_is_the_op_with_equal_inputs_and_its_consequences_are_folded(made: Made) -> None:
    found = replayfmt.compare(made("a", chain), made("b", lambda: chain(2.5)))
    assert found.outcome == "different" and len(found.roots) == 1
    first = found.first
    assert first is not None and first.kernels[0] == ("aten::mul.Tensor",)
    assert first.changed == [("other", "2.0", "2.5")]
    assert first.consequences == 4  # add, exp, sum, item
    assert first.distance is not None and first.distance.absolute == 5.5 and first.distance.worst == 11
    assert "mul.Tensor" in found.text and "2.0 against 2.5" in found.text


def test_of_two_independent_faults_both_are_named(made: Made) -> None:
    def program(one: float, other: float) -> None:
        x = torch.ones(4)
        a, b = x.mul(one).exp(), x.add(other).sin()
        (a + b).sum()

    found = replayfmt.compare(made("a", lambda: program(1, 2)), made("b", lambda: program(1.5, 2.5)))
    assert [each.kernels[0] for each in found.roots] == [("aten::mul.Tensor",), ("aten::add.Tensor",)]
    assert [each.consequences for each in found.roots] == [3, 1]


def test_inserted_ops_that_change_nothing_in_the_end_do_not_make_results_different(made: Made) -> None:
    found = replayfmt.compare(made("a", chain), made("b", lambda: chain(extra=True)))
    assert found.outcome == "equal"
    assert [(each.name, each.a, each.b) for each in found.structure] == [("aten::neg.default", 0, 2)]


@pytest.mark.slow
def test_what_one_run_logs_does_not_make_results_different(made: Made, tmp_path: Path) -> None:
    def program(log: bool) -> None:
        x = torch.arange(12.0).reshape(3, 4)
        for _step in range(3):
            x = x.mul(1.5)
            if log:
                print(x.abs().max().item(), x.std(), x[0].tolist())
            x = x.add(1)
        x.sum().item()

    found = replayfmt.compare(made("a", lambda: program(False)), made("b", lambda: program(True)))
    assert found.outcome == "equal" and found.divergence.aside and len(found.notes) == 1
    assert any(not row["compared"] for row in found.rows if row["kind"] == "unaligned")
    kept: list[torch.Tensor] = []
    more = made("c", lambda: (program(False), kept.append(torch.ones(3).mul(2)), program(False)))
    twice = made("d", lambda: (program(False), program(False)))
    assert replayfmt.compare(more, twice).outcome == "different"  # it is still there


@pytest.mark.slow
def test_what_the_host_reads_behind_other_ops_is_compared(made: Made) -> None:
    """Nothing of both captures reads it, so no op is left that would differ."""

    def program(detour: bool, scale: float) -> None:
        x, w = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(0.5, 2, 64).reshape(8, 8)
        y = (x.double() @ w.double()).float() if detour else x @ w
        z = y.mul(scale)
        z.add(1).sum().item()
        z.argmax().item()

    a = made("a", lambda: program(False, 2))
    for tolerance in ("exact", "auto"):
        found = replayfmt.compare(a, made(tolerance, lambda: program(True, 3)), tolerance=tolerance)
        assert found.outcome == "different", found.text
    assert replayfmt.compare(a, made("intact", lambda: program(True, 2)), tolerance="auto").outcome == "equal"


@pytest.mark.slow
def test_a_kernel_that_is_off_behind_rounding_is_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(detour: bool) -> None:
        x = torch.linspace(-2, 2, 64).reshape(8, 8)
        gelu((x.double() / 3).float() if detour else x * (1 / 3)).sum().item()

    a = made("a", lambda: program(False))
    assert replayfmt.compare(a, made("b", lambda: program(True)), tolerance="auto").outcome == "equal"
    monkeypatch.setitem(FAULT, "how", "1e-3")
    off = made("c", lambda: program(True))
    monkeypatch.undo()  # its tolerance is derived here
    found = replayfmt.compare(a, off, tolerance="auto")
    assert found.first is not None and found.first.kernels[0] == ("planted::gelu.default",), found.text


def test_results_that_are_kept_and_have_no_counterpart_are_not_called_equal(made: Made) -> None:
    kept: list[torch.Tensor] = []

    def program(narrow: bool) -> None:
        x = torch.linspace(-2, 2, 64).reshape(8, 8)
        y = (x * 0.5).exp() if narrow else x.div(2).exp()
        y.argmax().item()
        kept.append((y * 1.5).bfloat16() if narrow else y)

    found = replayfmt.compare(made("a", lambda: program(False)), made("b", lambda: program(True)), tolerance="auto")
    assert found.outcome == "different", found.text


@pytest.mark.slow
def test_an_op_called_differently_of_which_no_result_is_known_is_not_called_equal(made: Made) -> None:
    def program(scale: float) -> None:
        x = torch.arange(12.0)
        x.mul(scale).add(1)
        x.sum().item()

    a, b = (made(f"{scale}", lambda scale=scale: program(scale), digests="live") for scale in (1.25, 1.26))
    for tolerance in ("exact", "auto"):
        found = replayfmt.compare(a, b, tolerance=tolerance)
        assert found.outcome == "different" and found.first is None and found.divergence.unknown, found.text
    assert replayfmt.compare(a, made("again", lambda: program(1.25), digests="live")).outcome == "equal"


@pytest.mark.slow
def test_an_op_that_changes_more_than_rounding_behind_rounding_is_named(made: Made) -> None:
    def program(detour: bool, scale: float) -> None:
        x = torch.linspace(-2, 2, 64).reshape(8, 8)
        y = x * 0.5 * (1 + torch.erf(x * 0.7071067811865476)) if detour else torch.nn.functional.gelu(x)
        z = y.tanh()
        z = z.mul(scale) if scale != 1 else z
        z.sum().item()

    a = made("a", lambda: program(False, 1))
    found = replayfmt.compare(a, made("b", lambda: program(True, 1.001)), tolerance="auto")
    assert found.first is not None and "aten::mul.Tensor" in found.first.kernels[1], found.text
    assert replayfmt.compare(a, made("c", lambda: program(True, 1)), tolerance="auto").outcome == "equal"


def test_ops_that_only_one_capture_has_are_not_called_equal(made: Made) -> None:
    def more() -> None:
        chain()
        torch.ones(3).mul(3).add(1)

    found = replayfmt.compare(made("a", chain), made("b", more))
    assert found.outcome == "different" and found.first is None


@pytest.mark.slow
def test_without_digests_only_structure_is_compared_and_the_outcome_says_so(made: Made) -> None:
    found = replayfmt.compare(made("a", chain, digests="none"), made("b", chain, digests="none"))
    assert found.divergence.compared == 1  # the item
    quiet = lambda: torch.ones(3).mul(2)  # noqa: E731
    found = replayfmt.compare(made("c", quiet, digests="none"), made("d", quiet, digests="none"))
    assert (found.outcome, found.ok) == ("structure", False)
    assert "this does not say that they are equal" in found.text


def test_an_op_of_which_the_inputs_are_not_known_is_not_accused(made: Made) -> None:
    found = replayfmt.compare(made("a", chain, digests="live"), made("b", lambda: chain(2.5), digests="live"))
    assert found.outcome == "different" and found.first is None
    assert found.divergence.unknown and "not known whether their inputs are equal" in found.text


@pytest.mark.slow
def test_a_replay_makes_the_results_that_captures_lack_and_leaves_the_files(made: Made) -> None:
    a, b = made("a", chain, digests="live"), made("b", lambda: chain(2.5), digests="live")
    before = a.read_bytes(), b.read_bytes()
    found = replayfmt.compare(a, b, replay=True)
    assert found.first is not None and found.first.kernels[0] == ("aten::mul.Tensor",)
    assert found.first.distance is not None and found.first.distance.absolute == 5.5
    assert (a.read_bytes(), b.read_bytes()) == before
    assert replayfmt.compare(a, a, replay=True).outcome == "equal"


@pytest.mark.slow
def test_results_of_a_replay_that_differs_from_its_capture_are_not_used(tmp_path: Path, made: Made) -> None:
    wrong = captured(tmp_path / "wrong.opreplay", "moe", "1e-3")  # in this process only, and no more
    right = captured(tmp_path / "right.opreplay", "moe")
    with pytest.raises(ReplayMismatch, match="results of a replay are not the captured ones"):
        replayfmt.compare(right, wrong, replay=True)


def test_content_from_outside_that_differs_is_named(made: Made) -> None:
    one, other = torch.ones(4), torch.ones(4).mul_(1.5)
    found = replayfmt.compare(made("a", lambda: one.add(1).exp()), made("b", lambda: other.add(1).exp()))
    assert [each.kind for each in found.roots] == ["input"]
    assert "content from outside" in found.text


def test_other_seeds_are_another_state_of_the_generators_and_no_fault_of_an_op(made: Made) -> None:
    def program(seed: int) -> None:
        torch.manual_seed(seed)
        (torch.rand(8) + torch.randn(8)).sum()

    found = replayfmt.compare(made("a", lambda: program(1)), made("b", lambda: program(2)))
    assert [(each.kind, each.alike) for each in found.roots] == [("randomness", 1)]


def test_where_the_state_of_the_generators_is_not_known_no_draw_is_accused(made: Made) -> None:
    def program() -> None:
        torch.rand(8).add(1).sum().item()

    found = replayfmt.compare(
        made("a", program, payload="none", digests="none"), made("b", program, payload="none", digests="none")
    )
    assert found.outcome == "structure" or not found.roots
    assert found.alignment.share == 1.0


def test_captures_that_have_nothing_in_common_are_one_clear_error(made: Made, tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="no kernel in common"):
        replayfmt.compare(made("a", lambda: torch.ones(3).sin()), made("b", lambda: torch.arange(4).neg()))
    empty = tmp_path / "empty.opreplay"
    with ImportedSession(empty, imported_session("trace", "made")) as capture:
        capture.unsupported("collective", "c10d::send", "nothing else")
    with pytest.raises(NotComparable, match="no kernel in common"):
        replayfmt.compare(empty, empty)


@pytest.mark.slow
def test_a_setting_that_differs_is_shown(made: Made) -> None:
    def program(precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        try:
            chain()
        finally:
            torch.set_float32_matmul_precision("highest")

    found = replayfmt.compare(made("a", lambda: program("highest")), made("b", lambda: program("high")))
    assert found.outcome == "equal"
    assert any(each.what == "setting" and "float32_matmul_precision" in each.name for each in found.structure)


def test_another_dtype_is_aligned_and_compared_within_a_tolerance(made: Made) -> None:
    def program(dtype: torch.dtype) -> None:
        x = torch.linspace(0, 1, 16).to(dtype)
        x.mul(2).add(1).exp()

    a, b = made("a", lambda: program(torch.float32)), made("b", lambda: program(torch.float64))
    assert replayfmt.compare(a, b).alignment.pairs == 4  # all but the conversion
    assert replayfmt.compare(a, b).outcome == "different"
    assert replayfmt.compare(a, b, tolerance="1e-5,1e-6").outcome == "equal"


@pytest.mark.slow
def test_another_batch_size_is_aligned_and_its_shapes_are_a_result(made: Made) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).eval()

    def program(batch: int) -> None:
        with torch.no_grad():
            model(torch.ones(batch, 4))

    found = replayfmt.compare(made("a", lambda: program(1)), made("b", lambda: program(2)))
    assert found.alignment.share > 0.9
    assert any(each.what == "arguments" and "float32[1,4]" in each.a for each in found.structure)


@pytest.mark.slow
def test_a_compiled_region_is_compared_with_the_operators_it_replaces(made: Made) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)).eval()
    x = torch.randn(4, 16)
    with torch.no_grad():
        a = made("a", lambda: model(x).square().sum().item())
        compiled = torch.compile(model)
        compiled(x)
        b = made("b", lambda: compiled(x).square().sum().item())
    torch._dynamo.reset()
    found = replayfmt.compare(a, b, tolerance="1e-5,1e-6")
    (block,) = (each for each in found.alignment.blocks if each.outputs)
    assert {found.a.kernel(op) for op in block.a} >= {"aten::gelu.default", "aten::native_layer_norm.default"}
    assert any("cpp_fused" in found.b.kernel(op) for op in block.b)
    assert found.outcome == "equal", found.text


# ------------------------------------------------------------------------------------------------------- tolerances


@pytest.mark.slow
def test_ulp_and_relative_tolerances_decide_what_is_within(made: Made) -> None:
    a, b = made("a", chain), made("b", lambda: chain(2.0000002))
    assert replayfmt.compare(a, b).outcome == "different"
    within = replayfmt.compare(a, b, tolerance="1e-4,0")
    assert within.outcome == "equal" and within.divergence.within
    assert replayfmt.compare(a, b, tolerance="ulp:64").outcome == "equal"
    assert replayfmt.compare(a, b, tolerance="ulp:0").outcome == "different"


def test_a_file_gives_tolerances_by_kernel(made: Made, tmp_path: Path) -> None:
    a, b = made("a", chain), made("b", lambda: chain(2.0000002))
    rules = tmp_path / "rules.json"
    rules.write_text('{"aten::mul": "exact", "*": "float32=1e-3,0;1e-3,0"}')
    found = replayfmt.compare(a, b, tolerance=str(rules))
    assert [each.kernels[0] for each in found.roots] == [("aten::mul.Tensor",)]
    assert found.divergence.different == 1


@pytest.mark.parametrize("text", ["ulp:-1", "ulp:x", "1e-3", "nan,1", "1,-1", "", "flote=1,1", "no.json"])
def test_a_wrong_tolerance_is_refused(made: Made, text: str) -> None:
    with pytest.raises(UsageError, match="tolerance"):
        replayfmt.compare(made("a", chain), made("b", chain), tolerance=text)


@pytest.mark.slow
def test_derived_tolerances_accuse_no_op_of_what_threads_do(tmp_path: Path) -> None:
    paths = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            paths.append(captured(tmp_path / f"{threads}.opreplay", "gpt2_training"))
        finally:
            torch.set_num_threads(1)
    found = replayfmt.compare(*paths, tolerance="auto")
    assert found.outcome == "equal" and not found.roots, found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fault", "kernel"),
    [
        ("llama", "1e-3", "planted::gelu.default"),
        ("gpt2_training", "backward", "planted::gelu_backward.default"),
        ("gpt2_training", "epsilon", "aten::native_layer_norm.default"),
    ],
)
def test_derived_tolerances_find_a_fault_above_them(
    intact: Callable[[str], Path], tmp_path: Path, model: str, fault: str, kernel: str
) -> None:
    found = replayfmt.compare(intact(model), captured(tmp_path / "b.opreplay", model, fault), tolerance="auto")
    assert found.first is not None and kernel in found.first.kernels[0], found.text


@pytest.mark.parametrize("of", [1, 65_536], ids=["a record that is no op", "none"])
def test_a_digest_of_what_is_no_op_is_compared_with_nothing(made: Made, of: int) -> None:
    one, other = made("a", chain), made("b", chain)
    whole = replayfmt.compare(one, other)
    with open_capture(other) as reader:
        last = [each for each in reader.records() if each.kind is RecordKind.digest][-1].argument("of")
        assert reader.record(1).kind is not RecordKind.op

    def edit(columns: dict[str, np.ndarray]) -> None:
        (place,) = np.flatnonzero(columns["ints"] == last)[-1:]
        columns["ints"][place] = of

    change_records(other, edit)
    found = replayfmt.compare(one, other)
    assert not found.roots and found.divergence.compared == whole.divergence.compared - 1


def training(made: Made, name: str, order: tuple[int, ...] = (0, 1, 2), **options: object) -> Path:
    """Steps of AdamW on batches that were there before, in this order."""
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6))

    def program() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{"foreach": False, **options})
        for number in order:
            optimizer.zero_grad()
            (model(batches[number]) - batches[number]).square().mean().backward()
            optimizer.step()
        model(batches[0]).sum().item()

    return made(name, program)


@pytest.mark.slow
def test_one_op_for_all_parameters_stands_for_the_ops_for_each(made: Made) -> None:
    """What follows is aligned, and the memory that they wrote last is compared."""
    found = replayfmt.compare(training(made, "loop"), training(made, "all", foreach=True))
    assert found.outcome == "equal" and not found.alignment.doubts, found.text
    wrong = replayfmt.compare(training(made, "loop again"), training(made, "rate", foreach=True, weight_decay=0.3))
    assert wrong.first is not None and wrong.first.kind == "block", wrong.text
    assert any("_foreach_" in name for name in wrong.first.kernels[1])


@pytest.mark.slow
def test_a_fused_op_for_all_parameters_is_off_by_no_more_than_rounding_explains(made: Made) -> None:
    a, b = training(made, "loop"), training(made, "fused", foreach=None, fused=True)
    exact = replayfmt.compare(a, b)
    assert exact.first is not None and exact.first.kind == "block", exact.text
    found = replayfmt.compare(a, b, tolerance="auto")
    assert not found.roots and not found.alignment.doubts, found.text  # how much it is off depends on the CPU
    off = replayfmt.compare(a, training(made, "off", foreach=None, fused=True, eps=1e-3), tolerance="auto")
    assert off.first is not None and "aten::_fused_adamw_.default" in off.first.kernels[1], off.text


@pytest.mark.slow
def test_attention_as_one_op_and_as_its_parts_differ_by_what_rounding_explains(made: Made) -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def whole(scale: float) -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).mul(2).sum().item()

    def parts() -> None:
        ((q @ k.transpose(-2, -1)) * 8**-0.5).softmax(-1).matmul(v).mul(2).sum().item()

    a, b = made("whole", lambda: whole(8**-0.5)), made("parts", parts)
    assert replayfmt.compare(a, b).first is not None
    explained = replayfmt.compare(a, b, tolerance="auto")
    assert explained.outcome == "equal" and "1 group of ops" in "".join(explained.notes)
    off = replayfmt.compare(made("off", lambda: whole(0.35)), b, tolerance="auto")
    assert off.first is not None and any("scaled_dot_product" in name for name in off.first.kernels[0]), off.text


@pytest.mark.slow
def test_data_in_another_order_are_content_from_outside_that_differs(made: Made) -> None:
    found = replayfmt.compare(training(made, "a"), training(made, "b", (0, 2, 1)))
    assert found.alignment.share == 1 and not found.alignment.doubts, found.text
    assert found.first is not None and found.first.kind == "input", found.text


@pytest.mark.slow
def test_data_that_were_drawn_in_another_order_are_named(made: Made) -> None:
    def program(seeds: tuple[int, ...]) -> None:
        w = torch.ones(6)
        for seed in seeds:
            w.add_(torch.randn(6, generator=torch.Generator().manual_seed(seed)).mul(w).tanh())
        w.sum().item()

    found = replayfmt.compare(made("a", lambda: program((1, 2, 3))), made("b", lambda: program((1, 3, 2))))
    assert found.first is not None and found.first.kind == "randomness", found.text
    assert found.alignment.share == 1


@pytest.mark.slow
def test_an_op_that_writes_in_place_what_another_reads_later_is_in_what_is_blamed(made: Made) -> None:
    def program(inplace: bool) -> None:
        x = torch.linspace(-1, 1, 8).mul(3)
        for _ in range(3):
            y = torch.nn.functional.relu(x, inplace=inplace).mul(0.5)
            x = x.add(y)
        x.sum().item()

    found = replayfmt.compare(made("a", lambda: program(False)), made("b", lambda: program(True)))
    assert found.first is not None and "aten::relu_.default" in found.first.kernels[1], found.text


def test_a_product_with_other_views_of_the_same_is_equal(made: Made) -> None:
    a, b = torch.randn(2, 8, 16), torch.randn(2, 16, 8)

    def program(product: Callable[[], torch.Tensor]) -> None:
        for _ in range(2):
            product().square().mean().item()

    found = replayfmt.compare(
        made("a", lambda: program(lambda: a @ b)),
        made("b", lambda: program(lambda: torch.einsum("bij,bjk->bik", a, b))),
    )
    assert found.outcome == "equal" and not found.alignment.doubts, found.text


@pytest.mark.slow
def test_a_compiled_model_is_off_by_no_more_than_rounding_explains(made: Made) -> None:
    """All of a model is one block, with more weights than are looked at for most pairs."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)) for _ in range(8)]
    model, x = torch.nn.Sequential(*layers), torch.randn(4, 8)
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)

    def program(run: Callable[[torch.Tensor], torch.Tensor], scale: float = 1.0) -> None:
        with torch.no_grad():
            for _ in range(2):
                run(x).mul(scale).sum().item()

    a, b = made("eager", lambda: program(model)), made("compiled", lambda: program(compiled))
    found = replayfmt.compare(a, b, tolerance="auto")
    assert not found.roots and not found.alignment.doubts and found.divergence.within, found.text
    with torch.no_grad():
        layers[3][2].bias.add_(1e-3)
    off = replayfmt.compare(a, made("off", lambda: program(compiled)), tolerance="auto")
    assert off.outcome == "different" and off.first is not None, off.text
