"""A plan refuses what it cannot reproduce before the first op, with every finding at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Device, Kernel, Node, Signature, ValueKind
from replayfmt.replay.plan import Plan

from .conftest import Captured, unknown_use
from .rewriting import rewrite


def refusal(path: Path, *devices: str, allow_incomplete: bool = False) -> ReplayRefused:
    with pytest.raises(ReplayRefused) as caught:
        Plan(path, devices, allow_incomplete)
    assert caught.value.findings, "a refusal says why"
    assert str(path) in str(caught.value)
    return caught.value


def renamed(old: str, **fields: str) -> Callable[[Kernel], Kernel]:
    return lambda kernel: replace(kernel, **fields) if kernel.name == old else kernel


def test_a_capture_that_was_never_closed_is_refused_unless_allowed(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).exp().sum())
    partial = rewrite(source, tmp_path / "open.opreplay", close=False)
    (finding,) = refusal(partial).findings
    assert "incomplete" in finding and "--allow-incomplete" in finding
    with Plan(partial, allow_incomplete=True) as plan:
        assert plan.execute(verify="auto").outcome == "ok"


def test_content_that_is_not_in_the_capture_is_refused(captured: Captured) -> None:
    rows = torch.arange(3), torch.arange(3)
    (finding,) = refusal(captured(lambda: [unknown_use(each) for each in rows], payload="none")).findings
    assert finding.startswith("2 storages (1, 3) have no content in the capture (int64[3], self of aten::_convert_ind")
    assert "no safe value is known" in finding and "payload=none" in finding and "--replay-initializer" in finding


def test_unsupported_records_are_refused_by_reason_with_counts_and_places(captured: Captured, tmp_path: Path) -> None:
    def note(signature: Signature) -> Signature:
        if signature.kind is not RecordKind.scope_begin:
            return signature
        texts = {"reason": "compiled_region", "op": "forward", "detail": "a graph of 3 kernels"}
        nodes = tuple(Node(ValueKind.string, name, text) for name, text in texts.items())
        return Signature(RecordKind.unsupported, nodes)

    def program() -> None:
        for _ in range(5):
            with replayfmt.scope("step"):
                torch.ones(2).exp()

    path = rewrite(captured(program), tmp_path / "unsupported.opreplay", signature=note)
    finding = refusal(path).findings[0]
    assert finding.startswith("unsupported, compiled_region: forward 5 times, first at ordinals 0, ")
    assert finding.endswith(": a graph of 3 kernels")


def test_every_finding_is_listed_at_once(captured: Captured, tmp_path: Path) -> None:
    x, rows = torch.ones(3), torch.arange(3)
    source = captured(lambda: (x.exp(), x.sin(), unknown_use(rows)), payload="none")

    def change(kernel: Kernel) -> Kernel:
        if kernel.name == "aten::_convert_indices_from_coo_to_csr":
            return kernel
        return replace(kernel, name=kernel.name.replace("aten::", "somelibrary::"))

    findings = refusal(rewrite(source, tmp_path / "many.opreplay", kernel=change, close=False).resolve()).findings
    assert len(findings) == 4
    assert sum("somelibrary::" in finding and "--allow-import=MODULE" in finding for finding in findings) == 2


def test_an_operator_that_is_not_here_is_refused(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).exp())
    for fields, said in (
        ({"name": "aten::exponentiate"}, "aten::exponentiate.default does not exist in torch"),
        ({"overload": "Nope"}, "aten::exp.Nope does not exist in torch"),
        ({"name": "os::system"}, "os::system.default does not exist in torch"),
        ({"name": "aten::save"}, "aten::save.default does not exist in torch"),
        ({"name": "__class__::mro"}, "does not exist in torch"),
        ({"name": "aten::from_file"}, "host calls are not replayed"),
    ):
        path = rewrite(
            source,
            tmp_path / f"{len(str(fields))}{fields.get('name', 'overload')[-3:]}.opreplay",
            kernel=renamed("aten::exp", **fields),
        )
        (finding,) = refusal(path).findings
        assert said in finding and "; called once, at ordinal 2" in finding


def test_a_schema_that_changed_incompatibly_is_refused_with_both_versions(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).exp())
    changed = rewrite(
        source,
        tmp_path / "changed.opreplay",
        session={"torch_version": "3.1"},
        kernel=renamed("aten::exp", schema="aten::exp(Tensor self, int base) -> Tensor"),
    )
    (finding,) = refusal(changed).findings
    assert "aten::exp.default changed" in finding
    assert "torch 3.1" in finding and torch.__version__ in finding
    unreadable = rewrite(source, tmp_path / "unreadable.opreplay", kernel=renamed("aten::exp", schema="aten::exp(what"))
    assert "its captured schema cannot be read" in refusal(unreadable).findings[0]


def test_a_schema_that_only_gained_a_default_is_accepted(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).add(torch.ones(3)))
    older = rewrite(
        source,
        tmp_path / "older.opreplay",
        kernel=renamed("aten::add", schema="aten::add.Tensor(Tensor self, Tensor other) -> Tensor"),
    )
    with Plan(older) as plan:
        assert plan.execute(verify="auto").outcome == "ok"


def test_argument_names_that_are_none_never_reach_generated_code(captured: Captured, tmp_path: Path) -> None:
    def change(signature: Signature) -> Signature:
        if signature.kind is not RecordKind.op or len(signature.args) != 1:
            return signature
        (node,) = signature.args
        return replace(signature, args=(replace(node, name="self=print('in'), x"),))

    path = rewrite(captured(lambda: torch.ones(3).exp()), tmp_path / "hostile.opreplay", signature=change)
    assert "does not take the arguments" in refusal(path).findings[0]


def test_values_that_were_not_captured_are_refused(captured: Captured, tmp_path: Path) -> None:
    def change(signature: Signature) -> Signature:
        args = tuple(
            Node(ValueKind.opaque, node.name, "a ScriptObject") if node.kind is ValueKind.device else node
            for node in signature.args
        )
        return replace(signature, args=args)

    path = rewrite(captured(lambda: torch.ones(3)), tmp_path / "opaque.opreplay", signature=change)
    (finding,) = refusal(path).findings
    assert "aten::ones.default takes an opaque value that cannot be rebuilt (a ScriptObject)" in finding


def test_a_captured_device_that_is_not_here_is_refused_with_the_device_that_would_do(
    captured: Captured, tmp_path: Path
) -> None:
    source = captured(lambda: torch.ones(3).exp())
    path = rewrite(source, tmp_path / "elsewhere.opreplay", device=lambda device: Device("cuda", 7, "Somebody's GPU"))
    finding = refusal(path).findings[0]
    assert "cuda:7 (Somebody's GPU), which is not here" in finding and "--device=" in finding
    with Plan(path, ["cpu"]) as plan:
        result = plan.execute(verify="auto")
    assert result.outcome == "ok" and result.verification.mode == "close"
    assert "cuda:7 is replayed on cpu" in result.verification.reasons
    assert "give --device 1 time(s)" in refusal(path, "cpu", "cpu").findings[0]


def test_draws_of_another_kind_of_device_are_refused(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: (torch.rand(3), torch.ones(3).exp()))
    path = rewrite(source, tmp_path / "draws.opreplay", device=lambda device: Device("cuda", 0, "GPU"))
    (finding,) = refusal(path, "cpu").findings
    assert "aten::rand.default draws random numbers that only the captured kind of device can draw" in finding


def test_ops_without_a_kernel_for_the_mapped_device_are_refused_together(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: (torch.ones(3).exp(), torch.ones(3).sin()))

    def change(kernel: Kernel) -> Kernel:
        if kernel.name not in ("aten::exp", "aten::sin"):
            return kernel
        foreign = {"aten::exp": torch.ops.aten.cudnn_grid_sampler, "aten::sin": torch.ops.aten.miopen_convolution_relu}
        overload = foreign[kernel.name].default
        return Kernel(overload._schema.name, "default", str(overload._schema))

    path = rewrite(source, tmp_path / "foreign.opreplay", kernel=change)
    findings = refusal(path).findings
    assert any("aten::cudnn_grid_sampler.default has no kernel for cpu" in finding for finding in findings)
    assert any("aten::miopen_convolution_relu.default has no kernel for cpu" in finding for finding in findings)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", "cpu:x", ""])
def test_a_device_that_is_none_is_a_usage_error(captured: Captured, device: str) -> None:
    with pytest.raises(UsageError, match="--device="):
        Plan(captured(lambda: torch.ones(3)), [device])


def test_bitwise_with_nothing_to_compare_is_refused_and_auto_says_so(captured: Captured) -> None:
    path = captured(lambda: torch.ones(3).exp(), digests="none")
    with Plan(path) as plan:
        with pytest.raises(ReplayRefused, match="nothing to compare with"):
            plan.execute(verify="bitwise")
        result = plan.execute(verify="auto")
    assert result.outcome == "ok"
    assert result.verification.text.startswith("not verified: the capture holds nothing to compare with (digests=none)")


def test_an_unknown_setting_is_refused(captured: Captured, tmp_path: Path) -> None:
    changed = {"settings": {"warp_speed": 9}}
    path = rewrite(captured(lambda: torch.ones(3)), tmp_path / "setting.opreplay", session=changed)
    (finding,) = refusal(path).findings
    assert "the setting warp_speed = 9 does not exist" in finding


def test_a_capture_that_contradicts_itself_is_one_clear_error(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).exp().sum())

    def without_first_op(record: object, ints: list[int], floats: list[float]) -> bool:
        return record.ordinal != 0  # type: ignore[attr-defined]

    path = rewrite(source, tmp_path / "contradiction.opreplay", change=without_first_op)
    with Plan(path) as plan, pytest.raises(ReplayRefused, match="uses storage 1, which nothing before it produced"):
        plan.execute()
