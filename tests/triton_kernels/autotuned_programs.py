"""Programs with autotuners, of which each trial prefers the first configuration. As a script it captures each in the
directory that it is given, or with `compiled` after it one on a device that is not there, and prints what a replay
chooses again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import replayfmt


def first_is_best(call: Callable[[], None], quantiles: Any) -> list[float]:
    """Stands for a benchmark, which needs a device."""
    first_is_best.tried += 1  # type: ignore[attr-defined]
    return [float(first_is_best.tried)] * 3  # type: ignore[attr-defined]


first_is_best.tried = 0  # type: ignore[attr-defined]


@triton.jit
def add_kernel(out, x, count, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 16)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(out + at, tl.load(out + at, mask=mask) + tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def wide_kernel(out, x, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * TWICE + tl.arange(0, TWICE)
    tl.store(out + at, tl.load(x + at, mask=at < count) * (FACTOR * BLOCK + 2), mask=at < count)


def tuned(kernel: Any, sizes: tuple[int, ...] = (4, 64), **options: Any) -> Any:
    """The kernel under an autotuner. The configuration 4 is its choice, which is the slowest."""
    hook = options.pop("hook", None)
    configs = [triton.Config({"BLOCK": size}, pre_hook=hook) for size in sizes]
    return triton.autotune(configs, key=["count"], do_bench=first_is_best, **options)(kernel)


def added(kernel: Any, *counts: int) -> None:
    for count in counts:
        x, out = torch.randn(count), torch.ones(count)
        kernel[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](out, x, count)  # noqa: B023
        print(float(out.sum()))


plain = tuned(add_kernel)
failing = tuned(add_kernel, (4, 16, 64))
hooked = tuned(add_kernel, hook=lambda given: None)
pruning = {"early_config_prune": lambda configs, given, **_: configs[:2]}
pruned, pruned_before = (tuned(add_kernel, (4, 64, 8), prune_configs_by=pruning) for _ in range(2))
derived = tuned(triton.heuristics({"TWICE": lambda given: 2 * given["BLOCK"]})(wide_kernel))
valued = tuned(wide_kernel)


def with_heuristics() -> None:
    x, out = torch.randn(100), torch.empty(100)
    derived[lambda meta: (triton.cdiv(100, meta["TWICE"]),)](out, x, 100, FACTOR=0)


def that_compute_differently() -> None:
    """What the kernel computes depends on its configuration."""
    x, out = torch.randn(100), torch.empty(100)
    valued[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](out, x, 100, FACTOR=1, TWICE=64)


def with_another() -> None:
    added(plain, 100, 100, 201)
    wide_kernel[(1,)](torch.ones(9), torch.ones(9), 9, FACTOR=1, BLOCK=16, TWICE=16)


PROGRAMS: dict[str, Callable[[], None]] = {
    "plain": with_another,
    "chosen_before": lambda: added(plain, 100),
    "failing": lambda: added(failing, 100),
    "hooked": lambda: added(hooked, 100),
    "pruned": lambda: added(pruned, 100),
    "pruned_before": lambda: added(pruned_before, 100),
    "heuristics": with_heuristics,
    "different": that_compute_differently,
    "not_tuned": lambda: add_kernel[(7,)](torch.ones(100), torch.ones(100), 100, BLOCK=16 + 16) and None,
}


def add(out: torch.Tensor, x: torch.Tensor, count: int, block: int) -> None:
    """What the kernel does, the slower the more programs it is launched with."""
    for _ in range(count // block):
        x.sin()
    out += x


def on_a_device(path: Path) -> dict[str, Any]:
    from tests.triton_kernels.fake_device import install, replay_as_on_a_device

    driver = install(90, {"add_kernel": add})
    with replayfmt.capture(path):
        added(plain, 100_000)
    replay_as_on_a_device()
    with replayfmt.Plan(path, allow_code=True, autotune="again") as plan:
        plan.execute(verify="close")
        driver.launches.clear()
        plan.execute()
        assert plan.substitution is not None and plan.substitution.report is not None
        return {
            "launches": driver.launches,
            "binaries": len(driver.loaded),
            "choices": [each.row for each in plan.substitution.report.choices],
        }


if __name__ == "__main__":
    if sys.argv[2:] == ["compiled"]:
        print(json.dumps(on_a_device(Path(sys.argv[1]) / "compiled.opreplay")))
        sys.exit()
    added(pruned_before, 100)
    for name, program in PROGRAMS.items():
        torch.manual_seed(0)
        with replayfmt.capture(Path(sys.argv[1]) / f"{name}.opreplay"):
            program()
