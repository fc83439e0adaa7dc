"""Whether `--tolerance=auto` accuses what rounding explains, and misses what it does not.

Models run with one and with two threads: libraries split and order sums differently, so that results differ though
nothing is wrong. No op may be accused, each on the same inputs (`--isolate`) and in two captures of the program, where
errors are inherited. Then every op that runs in isolation gets a fault: one element of one result is off by 1.5 times
what is tolerated, which has to be found, and by half of it, which has not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_gpt2
import torch
from measuring import arguments, progress, row, scratch
from torch import nn

import replayfmt
from replayfmt.compare import isolate
from replayfmt.compare.distances import parse_tolerance
from replayfmt.compare.isolated import OtherWay, isolate_plan
from replayfmt.pytorch.rounding import MARGIN, largest, rounding_runs, spread_of
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.run_twice import Outcome


def gpt2() -> None:
    """Two training steps."""
    network = tiny_gpt2.model(layers=3, width=128, positions=64).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, foreach=False)
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        network(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()


def llama() -> None:
    """A prompt and four tokens of a decoder, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    network = LlamaForCausalLM(config).eval().bfloat16()
    with torch.no_grad():
        network.generate(torch.arange(1, 65)[None], max_new_tokens=5, do_sample=False)


def convolutions() -> None:
    """Two training steps of a residual network with batch and group norms."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm, nn.GELU())
        for norm in (nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.BatchNorm2d(16))
    ]
    first, head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
    parameters = [each for module in (first, *blocks, head) for each in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    for _ in range(2):
        x = first(torch.randn(8, 3, 32, 32))
        for block in blocks:
            x = x + block(x)
        nn.functional.cross_entropy(head(x.mean((2, 3))), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Planted(OtherWay):
    """Runs each op the same way, but that one element of its first result of numbers is off by `times` what is
    tolerated."""

    def __init__(self, plan: Plan, times: float) -> None:
        super().__init__(plan, settings={"num_threads": 1})
        self.times = times
        self.planted: set[int] = set()

    def run(self, site: Any, copies: tuple[Any, Any], states: list[torch.Tensor]) -> Outcome:
        args, named = copies

        def outputs(taken: tuple[Any, ...], by_name: dict[str, Any]) -> list[torch.Tensor] | None:
            try:
                with self.drawing_from(site, states):
                    return list(Outcome.of(site, site.original(*taken, **by_name), taken, by_name).values.values())
            except Exception:
                return None  # as in a comparison: an op that refuses float64 or such inputs

        clones = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        spreads = spread_of(outputs(tuple(clones), dict(named)), rounding_runs(outputs, args, named))
        made = super().run(site, copies, states)
        for place, (key, result) in enumerate(made.values.items()):
            if not spreads.get(place) or not result.isfinite().all():
                continue
            faulty = result.detach().clone(memory_format=torch.contiguous_format)
            element = faulty.abs().argmax()
            sign = 1.0 if faulty.flatten()[element] >= 0 else -1.0
            wanted = faulty.double().flatten()[element] - sign * self.times * MARGIN * spreads[place]
            faulty.view(-1)[element] = wanted.to(faulty.dtype)
            off = largest(faulty.double() - result.double()) / (MARGIN * spreads[place])
            if off > 1.0 if self.times > 1 else 0.0 < off < 1.0:  # not where the dtype has no such number
                made.values[key] = faulty
                self.planted.add(site.ordinal)
            break
        return made


def accused(path: Path, times: float) -> tuple[int, int]:
    """Ops with such a fault, and how many of them are accused."""
    with Plan(path) as plan:
        way = Planted(plan, times)
        found = isolate_plan(plan, way, parse_tolerance("auto"))
        beyond = sum(kernel.beyond for kernel in found.kernels)
    return len(way.planted), beyond


def main() -> None:
    models: list[Callable[[], None]] = [convolutions] if arguments(__doc__).quick else [gpt2, llama, convolutions]
    compared = different = false_alarms = roots = planted = found = within = spared = 0
    with scratch() as directory:
        for model in models:
            progress(model.__name__)
            paths = [directory / f"{model.__name__}-{threads}.opreplay" for threads in (1, 2)]
            for threads, path in enumerate(paths, 1):
                torch.set_num_threads(threads)
                with replayfmt.capture(path, digests="ops"):
                    model()
            torch.set_num_threads(1)
            each = isolate(paths[0], settings={"num_threads": 2}, tolerance="auto")
            compared += each.compared
            different += sum(kernel.different for kernel in each.kernels)
            false_alarms += sum(kernel.beyond for kernel in each.kernels)
            both = replayfmt.compare(*paths, tolerance="auto")
            roots += len([root for root in both.roots if root.kind == "op"])
            count, beyond = accused(paths[0], 1.5)
            planted, found = planted + count, found + beyond
            count, beyond = accused(paths[0], 0.5)
            within, spared = within + count, spared + count - beyond
    details = {"models": [model.__name__ for model in models], "ops": compared, "different_with_two_threads": different}
    row("derived tolerances: ops accused that differ by threads", false_alarms, "", at_most=0, **details)
    row("derived tolerances: captures of one and two threads part", roots, "", at_most=0, **details)
    row("derived tolerances: faults of 1.5 times it found", found / planted, "", at_least=1, planted=planted)
    row("derived tolerances: faults of half of it accepted", spared / within, "", planted=within)


if __name__ == "__main__":
    main()
