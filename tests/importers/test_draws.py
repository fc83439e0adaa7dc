"""Random numbers of an imported trace: drawn where it is replayed, said so, and nothing else is disturbed."""

from __future__ import annotations

import torch

import replayfmt

from .conftest import Import
from .traces import H100, kernel, launch, op, scalar, tensor

DROPOUT = [
    op("aten::native_dropout", 10, 40, [tensor("float", 64, 64), scalar("0.5"), scalar("True")], external=1),
    launch(5, 20),
    kernel(5, 60, 30, external_id=1),
]


def test_ops_that_drew_on_a_gpu_draw_on_the_host_and_a_note_says_so(imported: Import) -> None:
    result = imported(DROPOUT, deviceProperties=[H100])
    assert result.ops == ["aten::native_dropout.default"]
    state = torch.default_generator.get_state()
    with replayfmt.Plan(result.reader, devices=["cpu"]) as plan:
        done = plan.execute()
        (ordinal,) = (each.ordinal for each in result.of("op"))
        verdict, first = plan.run_single(ordinal)
        _verdict, second = plan.run_single(ordinal)
    assert done.outcome == "ok" and verdict.verdict == "ok"
    assert (
        "aten::native_dropout.default draws random numbers that the captured device would have drawn differently"
        in done.notes
    )
    assert 0 < int(first[1].sum()) < 64 * 64 and torch.equal(first[1], second[1])
    assert torch.equal(torch.default_generator.get_state(), state)
