"""Regions whose kernels Inductor generates in Triton, for a device that is not there: see tests/triton_kernels. As a
script it works in the directory that it is given, and prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_heuristics as heuristics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import configuration_rows, contents_of
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.replay.resolution.code_kernels import resolve_triton
from tests.triton_kernels.fake_device import install, replay_as_on_a_device

ARCH = 90
Program = Callable[[torch.Tensor], torch.Tensor]


def sine(given: torch.Tensor, out: torch.Tensor, _count: int, _block: int) -> None:
    out.copy_(given.sin())


def rectified(given: torch.Tensor, _count: int, _block: int) -> None:
    given.copy_(given.relu() + 1)


DOES = {
    "triton_poi_fused_sin_0": sine,
    "triton_poi_fused_add_relu_1": rectified,
    "triton_poi_fused_exp_0": lambda given, out, *_sizes: out.copy_(given.exp()),
    "triton_poi_fused_add_exp_0": lambda given, out, *_sizes: out.copy_(given.exp() + 1),
}


def capture(path: Path, run: Program, x: torch.Tensor) -> dict[str, Any]:
    """A capture of one call, and what is in it."""
    before = len(DRIVER.launches)
    with replayfmt.capture(path):
        result = run(x)
    made = [[name, list(grid), warps] for name, grid, warps in DRIVER.launches[before:]]
    found: dict[str, Any] = {"result": result.tolist(), "launches": made, "ops": [], "kernels": {}, "unsupported": []}
    found["imports"] = []
    with CaptureReader(path) as reader:
        found["configurations"] = configuration_rows(reader)
        for record in reader.records():
            texts = {node.name: node.constant for node in record.signature.args} if record.signature else {}
            if record.kind is RecordKind.unsupported:
                found["unsupported"].append([texts["reason"], texts["op"], texts["detail"]])
            if record.kind is RecordKind.storage_import:
                found["imports"].append(texts["reason"])
            if record.kind is RecordKind.op:
                found["ops"].append(reader.kernels[record.signature.kernel].name)
        for kernel in reader.kernels:
            if kernel is not None and kernel.kind is KernelKind.triton:
                contents = contents_of(reader, kernel)
                found["kernels"][kernel.name] = {
                    "schema": kernel.schema,
                    "roles": sorted(contents),
                    "target": json.loads(contents["metadata"])["target"],
                    "how": launched(kernel, contents),
                }
    return found


def launched(kernel: Any, contents: dict[str, bytes]) -> Any:
    """How a kernel that adds in place is launched again, and what it makes of -1 and 1."""
    resolved = resolve_triton(kernel, lambda: contents, frozenset({"cuda"}))
    loaded = resolved if isinstance(resolved, str) else resolved.loaded()
    if isinstance(loaded, str) or kernel.name != "triton::triton_poi_fused_add_relu_1":
        return loaded if isinstance(loaded, str) else loaded.how
    resolved = loaded
    x = torch.tensor([-1.0, 1.0]).repeat(32)
    options = {"num_warps": 1, "num_ctas": 1, "num_stages": 1, "debug": True, "sanitize_overflow": False}
    resolved.call(x, 64, XBLOCK=64, grid=[1, 1, 1], enable_fp_fusion=True, **options)
    return [resolved.how, x[:2].tolist()]


def chained(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).relu() + 1


def compiled_elsewhere(program: Program, x: torch.Tensor) -> Program:
    """A program whose kernels one of Inductor's workers has compiled: a process that sends them back in pickles."""
    with inductor_config.patch(compile_threads=2, worker_start_method="fork"):
        PyCodeCache.cache_clear()  # a worker has loaded no kernels before
        torch._dynamo.reset()
        AsyncCompile.wait_pool_ready()
        TUNERS.clear()
        run: Any = torch.compile(program)
        run(x)
        AsyncCompile.process_pool().shutdown()
    AsyncCompile._ready_future = None
    assert not TUNERS, "the kernels were compiled here"
    return run


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("the program's own compiler refuses")


def main() -> None:
    folder, x = Path(sys.argv[1]), torch.arange(64.0).reshape(8, 8) / 64
    found: dict[str, Any] = {}
    run: Any = torch.compile(chained)
    expected = run(x)
    found["expected"] = expected.tolist()
    found["plain"] = capture(folder / "plain.opreplay", run, x)
    with inductor_config.patch(max_autotune_pointwise=True):
        wide = torch.arange(1 << 13).float() / (1 << 13)
        tuned: Any = torch.compile(lambda x: x.exp())
        found["tuned"] = capture(folder / "tuned.opreplay", tuned, wide) | {"result": None}
        found["tuned before"] = capture(folder / "tuned_before.opreplay", tuned, wide) | {"result": None}
    with inductor_config.patch(coordinate_descent_tuning=True):
        descended: Any = torch.compile(lambda x: x.exp() + 1)
        found["descended"] = capture(folder / "descended.opreplay", descended, wide) | {"result": None}

    class Plugin:
        def pre_dispatch(self, tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return heuristics.DEFER

    tuner = next(each for each in TUNERS if each.fn.__name__ == "triton_poi_fused_sin_0")
    tuner._plugins = [Plugin()]
    found["plugin"] = capture(folder / "plugin.opreplay", run, x)
    tuner._plugins = []
    for owner, name in ((heuristics.GridExpr, "eval_slow"), (CachingAutotuner, "_create_compile_options")):
        kept = vars(owner)[name]
        delattr(owner, name)  # as in a PyTorch that has another way to do it
        found[f"lacks {name}"] = capture(folder / f"{name}.opreplay", run, x)
        setattr(owner, name, kept)
    precompile = CachingAutotuner.precompile
    CachingAutotuner.precompile = refuse  # type: ignore[method-assign]
    tuner.launchers, tuner._cached_launcher, launchers = [], None, tuner.launchers
    try:
        found["refused"] = capture(folder / "refused.opreplay", run, x)
    except ValueError as error:
        found["refused"] = str(error)
    CachingAutotuner.precompile, tuner.launchers = precompile, launchers  # type: ignore[method-assign]
    for tuner in TUNERS:
        for result in tuner.compile_results:
            result.kernel._cubin_path = ""  # as Inductor has it
            result.kernel = StaticallyLaunchedCudaKernel(result.kernel)
    found["static"] = capture(folder / "static.opreplay", run, x)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)):
        found["static and gone"] = capture(folder / "gone.opreplay", run, x)
    elsewhere = compiled_elsewhere(chained, x)
    found["elsewhere"] = capture(folder / "elsewhere.opreplay", elsewhere, x)
    replay_as_on_a_device()
    with replayfmt.Plan(folder / "tuned.opreplay", allow_code=True, autotune="again") as plan:
        outcome = plan.execute(verify="close").outcome
        assert plan.substitution is not None and plan.substitution.report is not None
        found["again"] = [outcome, [each.row for each in plan.substitution.report.choices]]
    try:
        with replayfmt.Plan(folder / "tuned_before.opreplay", allow_code=True, autotune="again"):
            found["again before"] = []
    except ReplayRefused as refused:
        found["again before"] = refused.findings
    print(json.dumps(found))


if __name__ == "__main__":
    DRIVER = install(ARCH, DOES)
    inductor_config.cpu_backend = "triton"
    vars(heuristics)["GPUTarget"] = lambda _kind, _arch, _width: GPUTarget("cuda", ARCH, 32)
    TUNERS: list[Any] = []
    made = CachingAutotuner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        TUNERS.append(self)

    CachingAutotuner.__init__ = init  # type: ignore[method-assign]
    main()
