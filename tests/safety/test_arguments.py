"""Arguments that kernels take for granted: what an operator's schema tells is looked at before a kernel is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from failure.table import recorded
from replay.rewriting import rewrite
from torch.nn import functional as F

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import ValueKind
from replayfmt.format.model import Node, Record, Signature
from replayfmt.pytorch.overloads import ArgumentRules
from replayfmt.replay.plan import Plan

aten = torch.ops.aten


@pytest.mark.guarantee("arguments")
def test_a_number_in_place_of_a_dtype_is_refused_before_a_kernel_uses_it(tmp_path: Path) -> None:
    """Dozens of kernels look the number up in a table, wherever that leads."""
    source = recorded(tmp_path, lambda: torch.arange(0, 4, dtype=torch.int64))

    def change(signature: Signature) -> Signature:
        return replace(
            signature,
            args=tuple(
                Node(ValueKind.int, node.name) if node.kind is ValueKind.dtype else node for node in signature.args
            ),
        )

    def number(record: Record, ints: list[int], _floats: list[float]) -> None:
        if any(node.kind is ValueKind.dtype for node in record.signature.args):
            ints.append(-5)

    path = rewrite(source, tmp_path / "number.opreplay", signature=change, change=number)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    assert any(
        "aten::arange takes a dtype as `dtype`, the capture has an integer" in each for each in refused.value.findings
    )
    with Plan(path, keep_going=True) as plan:
        result = plan.execute(keep_going=True)
    assert result.outcome == "incomplete"


def _values(name: str, count: int) -> Node:
    return Node(ValueKind.list, name, None, tuple(Node(ValueKind.int) for _ in range(count)))


@pytest.mark.guarantee("arguments")
@pytest.mark.parametrize(
    ("operator", "node", "said"),
    [
        (aten._stack.default, Node(ValueKind.list, "tensors"), "takes at least one tensor as `tensors`"),
        (aten._foreach_copy.default, Node(ValueKind.list, "self"), "takes at least one tensor as `self`"),
        (aten._slow_conv2d_backward.output_mask, _values("padding", 0), "takes 1 or 2 values as `padding`"),
        (
            aten.fractional_max_pool3d_backward.default,
            _values("output_size", 0),
            "takes 1 or 3 values as `output_size`",
        ),
        (aten.reflection_pad2d_backward.default, _values("padding", 3), "takes 1 or 4 values as `padding`"),
        (aten.empty_like.default, Node(ValueKind.int, "layout"), "takes a layout as `layout`"),
        (aten.empty_like.default, Node(ValueKind.int, "memory_format"), "takes a memory_format as `memory_format`"),
    ],
)
def test_lists_and_codes_that_kernels_do_not_look_at_are_looked_at(
    operator: torch._ops.OpOverload, node: Node, said: str
) -> None:
    assert said in ArgumentRules(operator._schema).problem((Node(ValueKind.none, "other"), node))


@pytest.mark.parametrize(
    ("operator", "node"),
    [
        (aten.cat.default, Node(ValueKind.list, "tensors")),
        (aten.sum.dim_IntList, _values("dim", 3)),
        (aten.conv2d.default, _values("stride", 1)),
        (aten.avg_pool2d_backward.default, _values("stride", 0)),
        (aten.arange.start_step, Node(ValueKind.int, "step")),
        (aten.arange.start_step, Node(ValueKind.none, "dtype")),
    ],
)
def test_what_kernels_look_at_themselves_is_left_to_them(operator: torch._ops.OpOverload, node: Node) -> None:
    assert ArgumentRules(operator._schema).problem((node,)) == ""


def test_pools_without_a_stride_replay_forwards_and_backwards(tmp_path: Path) -> None:
    image = torch.rand(1, 2, 8, 8, requires_grad=True)

    def program() -> None:
        (F.avg_pool2d(image, 2) + F.max_pool2d(image, 2) + F.adaptive_avg_pool2d(image, 4)).sum().backward()
        F.interpolate(image, scale_factor=2).sum().backward()
        F.pad(F.conv2d(image, torch.ones(2, 2, 3, 3), padding=1), (1, 1, 1, 1), mode="reflect").sum().backward()

    with Plan(recorded(tmp_path, program, digests="ops")) as plan:
        assert plan.execute(verify="auto").outcome == "ok"
