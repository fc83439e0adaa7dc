"""Launches of compiled kernels, recorded and launched again on a device that is not there. As a script it works in the
directory that it is given, and prints what it found as JSON."""

from __future__ import annotations

import contextvars
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import _allocation, jit
from triton.runtime.jit import JITFunction

import replayfmt
from replayfmt.errors import ReplayFailed
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.replay.resolution.code_kernels import launcher_of, resolve_triton
from tests.triton_kernels import programs
from tests.triton_kernels.fake_device import install, replay_as_on_a_device


def double(x: torch.Tensor, n: int, block: int) -> None:
    x[:n] *= 2


def fill(out: torch.Tensor, value: float, n: int, block: int) -> None:
    out[:n] += value


def apply(x: torch.Tensor, out: torch.Tensor, n: int, block: int, function: Any, into: Any) -> None:
    out[:n] = (x[:n] * 3).half()


def name(x: torch.Tensor, value: float, block: int) -> None:
    x[:block] = value


def describe(x: torch.Tensor, out: torch.Tensor, *_: int) -> None:
    out.copy_(x * 2)


def describe_to(x: Any, out: Any, *_: int) -> None:
    out.base.copy_(x.base + 1)


def add_stages(x: torch.Tensor, grid: int, stages: int) -> None:
    x.fill_(grid + stages)


def add_both(x: torch.Tensor, stages: int, given: int, warps: int) -> None:
    x.fill_(stages + given + warps)


DOES = {
    "described_kernel": describe_to,
    "launch_grid_kernel": add_stages,
    "named_like_options": add_both,
    "describing_kernel": describe,
    "double_kernel": double,
    "fill_kernel": fill,
    "applied_kernel": apply,
    "named_kernel": name,
}


def apply(x: torch.Tensor, out: torch.Tensor, n: int, block: int, function: Any, into: Any) -> None:
    out[:n] = (x[:n] * 3).half()


def named(x: torch.Tensor, value: float, block: int) -> None:
    x[:block] = value


def record(path: Path) -> list[float]:
    x = torch.arange(8.0)
    with replayfmt.capture(path, digests="ops"):
        programs.double_kernel[(2,)](x, 8, BLOCK=4, num_warps=2)
        programs.double_kernel[(2,)](x, 8, BLOCK=4, num_warps=2)
        programs.double_kernel[(1,)](x[1:], 3, BLOCK=4)  # of another alignment
        compiled = programs.double_kernel.warmup(x, 8, BLOCK=8, grid=(1,))
        compiled[(1, 1, 1)](x, 8, 8)  # past the decorated function
        programs.tuned_kernel[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](x, 0.5, 8)
    return x.tolist()


def kernels_of(path: Path) -> list[dict[str, Any]]:
    with CaptureReader(path) as reader:
        assert reader.summary is not None and not reader.summary.unsupported, reader.summary.unsupported
        kernels = [kernel for kernel in reader.kernels if kernel is not None and kernel.kind is KernelKind.triton]
        return [{"kernel": kernel, "contents": contents_of(reader, kernel)} for kernel in kernels]


def launched(kernel: Any, contents: dict[str, bytes], *arguments: Any, **options: Any) -> dict[str, Any]:
    """What comes of launching a captured kernel. `fused`: whether what was launched may fuse products and sums."""
    resolved = resolve_triton(kernel, lambda: contents, frozenset({"cuda"}))
    loaded = resolved if isinstance(resolved, str) else resolved.loaded()
    if isinstance(loaded, str):
        return {"refused": loaded}
    try:
        resolved.call(*arguments, **options)
    except ReplayFailed as error:
        return {"how": resolved.how, "failed": str(error)}
    return {"how": resolved.how, "fused": [each.metadata.enable_fp_fusion for each in resolved.launched_here()]}


def launched_often(kernel: Any, contents: dict[str, bytes]) -> dict[str, Any]:
    """What comes of launches of one kernel after each other: whether Triton looked for what it compiled, what was
    launched, what was refused."""
    driver, looked, found = install(90, DOES), [0], {}
    resolved = resolve_triton(kernel, lambda: contents, frozenset({"cuda"}))
    assert not isinstance(resolved, str) and resolved.loaded() is resolved, resolved
    options = {"BLOCK": 4, "grid": [2], "num_warps": 2, "num_ctas": 1, "num_stages": 3}
    find, run = jit.compute_cache_key, JITFunction.run

    def counted(*arguments: Any) -> Any:
        looked[0] += 1
        return find(*arguments)

    def launch(name: str, x: torch.Tensor | None = None, n: Any = 8, **changed: Any) -> None:
        x = torch.ones(8) if x is None else x
        looked[0], before, failed = 0, len(driver.launches), ""
        try:
            resolved.call(x, n, **{**options, **changed})
        except ReplayFailed as error:
            failed = str(error)
        grids = [grid for _name, grid, _warps in driver.launches[before:]]
        found[name] = {"looked": looked[0], "grids": grids, "failed": failed, "x": x.tolist()}

    runtime, notes = knobs.runtime, []
    jit.compute_cache_key = counted
    launch("first")  # which checks the grid
    launch("second")  # which keeps what Triton launched
    launch("again")
    launch("another length", n=3)
    launch("another grid", grid=[3])
    launch("another grid again", grid=[3])
    launch("another alignment", torch.ones(9)[1:])
    launch("another dtype", torch.ones(8, dtype=torch.float64))
    launch("a length that is divisible", n=16)
    launch("a length of one", n=1)
    launch("a long length", n=1 << 40)
    launch("a length of another type", n=8.0)
    launch("another constant", BLOCK=8)
    launch("other options", num_warps=4)
    launch("as before")

    def entered(said: Any) -> None:
        notes.append(["enter", said.get()["name"]])

    def left(said: Any) -> None:
        notes.append(["exit", said.get()["name"]])

    runtime.launch_enter_hook.add(entered)
    runtime.launch_exit_hook.add(left)
    launch("with hooks on launches")
    runtime.launch_enter_hook.remove(entered)
    runtime.launch_exit_hook.remove(left)
    runtime.debug = True
    launch("with Triton's checks on")
    runtime.debug = False
    launch("with them off again")
    function: Any = resolved._function  # type: ignore[attr-defined]
    function.add_pre_run_hook(lambda *arguments, **given: notes.append(["before", given["BLOCK"]]))
    launch("with a hook before launches")
    function.pre_run_hooks.clear()

    def seen(self: Any, *arguments: Any, **given: Any) -> Any:
        notes.append(["seen", given["grid"]])
        return run(self, *arguments, **given)

    JITFunction.run = seen
    launch("with another function in Triton's place")
    JITFunction.run = run
    function.device_caches.clear()
    launch("with nothing kept")
    launch("with something kept again")
    triton.__version__, version = "3.10.0", triton.__version__
    launches = launcher_of(function)
    triton.__version__ = version
    for _ in range(2):
        looked[0] = 0
        launches(torch.ones(8), 8, **options)
        notes.append(["looked by another Triton", looked[0]])
    jit.compute_cache_key = find
    return {"launches": found, "notes": notes}


@triton.jit
def describing_kernel(x, out, m, n, M: tl.constexpr, N: tl.constexpr):
    """It makes its descriptors itself, in memory that Triton gives it."""
    given = tl.make_tensor_descriptor(x, shape=[m, n], strides=[n, 1], block_shape=[M, N])
    made = tl.make_tensor_descriptor(out, shape=[m, n], strides=[n, 1], block_shape=[M, N])
    made.store([tl.program_id(0) * M, 0], given.load([tl.program_id(0) * M, 0]) * 2)


def with_memory(path: Path) -> dict[str, Any]:
    """What comes of launches of a kernel that needs memory: bytes that were given to it, by whom."""
    driver, allocated = install(90, DOES), []

    def allocate(length: int, _alignment: int, _stream: Any) -> torch.Tensor:
        allocated.append(length)
        return torch.empty(length, dtype=torch.int8)

    def captured() -> None:
        triton.set_allocator(allocate)
        with replayfmt.capture(path):
            describing_kernel[(2,)](torch.ones(32, 16), torch.empty(32, 16), 32, 16, 16, 16)

    contextvars.copy_context().run(captured)
    (kernel,) = kernels_of(path)
    found: dict[str, Any] = {"capture": (driver.given, list(allocated))}
    options = {"M": 16, "N": 16, "grid": [2], "num_warps": 4, "num_ctas": 1, "num_stages": 3}
    for kept in (True, False):
        driver = install(90, DOES)
        contents = {role: text for role, text in kernel["contents"].items() if kept or role in ("source", "metadata")}
        resolved = resolve_triton(kernel["kernel"], lambda: contents, frozenset({"cuda"}))  # noqa: B023 - called at once
        assert not isinstance(resolved, str) and resolved.loaded() is resolved, resolved
        x, out = torch.ones(32, 16), torch.zeros(32, 16)
        for _ in range(3):
            resolved.call(x, out, 32, 16, **options)
        own = (driver.given, list(allocated), out.tolist() == (x * 2).tolist())
        triton.set_allocator(allocate)
        resolved.call(x, out, 32, 16, **options)
        found[resolved.how] = [*own, allocated[1:]]
        del allocated[1:]
        triton.set_allocator(_allocation.NullAllocator())
    return found


def without_sources(path: Path) -> dict[str, Any]:
    """What comes of launching kernels of whose capture the sources were left out, on two devices."""
    driver = install(90, DOES)
    x, out = torch.arange(6.0), torch.zeros(8)
    with replayfmt.capture(path, digests="ops", sources=False):
        programs.applied_kernel[(1,)](x, out, 6, BLOCK=8, function=programs.scaled, into=tl.float16)
        programs.named_kernel[(1,)](x=out[4:], value=2.0)
        triton.jit(programs.double_kernel.fn, do_not_specialize=["n"])[(1,)](out, 1, BLOCK=8)
        programs.heuristic_kernel[(1,)](out, 3.0, 8)
    found: dict[str, Any] = {"computed": out.tolist(), "recorded": list(driver.launches)}
    for arch in (90, 80):
        driver = install(arch, DOES)
        given = {"x": x, "out": torch.zeros(8)}
        with CaptureReader(path) as reader:
            said = [launch_again(reader, record, given) for record in map(reader.record, range(reader.record_count))]
        found[str(arch)] = {
            "said": [each for each in said if each],
            "launches": driver.launches,
            "out": given["out"].tolist(),
        }
    found["kept"] = [role for each in kernels_of(path) for role in each["contents"]]
    return found


def launch_again(reader: CaptureReader, record: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Launch what a record says on tensors of the test's own; nothing for other records."""
    kernel = reader.kernels[record.signature.kernel] if record.signature.kind is RecordKind.op else None
    if kernel is None or kernel.kind is not KernelKind.triton:
        return {}
    values: dict[str, Any] = {}
    for node, value in zip(record.signature.args, record.args, strict=True):
        if isinstance(value, TensorValue):
            whole = given["x" if value.meta.sizes == (6,) else "out"]
            value = whole[8 - value.meta.sizes[0] :] if whole is given["out"] else whole
        values[node.name] = value
    return launched(kernel, contents_of(reader, kernel), **values)


@triton.jit
def named_like_options(x, num_stages: tl.constexpr, given, num_warps: tl.constexpr):
    tl.store(x + tl.program_id(0), given + num_stages + num_warps)


def replayed(path: Path) -> list[Any]:
    """The outcome and the notes of a replay of launches by name, by position, and of descriptors."""
    install(90, DOES)
    replay_as_on_a_device()
    x = torch.zeros(3)
    with replayfmt.capture(path):
        named_like_options[(3,)](x, num_stages=1, given=4, num_warps=1)
        y = x + 1
        named_like_options[(3,)](x, 3, 4, num_warps=2)
        kept = x, y, programs.names_that_launches_have(), programs.descriptors()
    assert kept[2].tolist() == [6.0] * 3
    with replayfmt.Plan(path, allow_code=True) as plan:
        result = plan.execute(verify="bitwise")
        return [result.outcome, *result.notes]


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for arch in (80, 90):
        driver = install(arch, DOES)
        programs.double_kernel.device_caches.clear()
        programs.fill_kernel.device_caches.clear()
        path = folder / f"sm{arch}.opreplay"
        result = record(path)
        made = [(name, grid, warps) for name, grid, warps in driver.launches]
        found[f"sm{arch}"] = {
            "result": result,
            "launches": made,
            "kernels": [
                {
                    "name": each["kernel"].qualified_name,
                    "schema": each["kernel"].schema,
                    "roles": sorted(each["contents"]),
                    "metadata": json.loads(each["contents"]["metadata"]),
                    "elf": each["contents"]["cubin"][:4] == b"\x7fELF",
                }
                for each in kernels_of(path)
            ],
        }
    here = kernels_of(folder / "sm90.opreplay")
    first = here[0]
    kernel, contents = first["kernel"], first["contents"]
    options = {"BLOCK": 4, "grid": [2], "num_warps": 2, "num_ctas": 1, "num_stages": 3}
    cases: dict[str, Any] = {}

    def case(name: str, arch: int, contents: dict[str, bytes], x: torch.Tensor, **changed: Any) -> None:
        driver = install(arch, DOES)
        cases[name] = {
            **launched(kernel, contents, x, 8, **{**options, **changed}),
            "launches": driver.launches,
            "stored": [binary == first["contents"]["cubin"] for binary in driver.loaded],
            "x": x.tolist(),
        }

    case("same device", 90, contents, torch.ones(8))
    torch.accelerator.device_count, one = lambda: 2, torch.accelerator.device_count  # type: ignore[assignment]
    case("one of several devices", 90, contents, torch.ones(8))
    torch.accelerator.device_count = one
    case("another device", 80, contents, torch.ones(8))
    changed = json.loads(contents["metadata"])
    changed["compiled"]["triton_version"] = "3.0.0"
    case("another Triton", 90, {**contents, "metadata": json.dumps(changed).encode()}, torch.ones(8))
    changed["compiled"]["enable_fp_fusion"] = False
    case(
        "another Triton and other arithmetic", 90, {**contents, "metadata": json.dumps(changed).encode()}, torch.ones(8)
    )
    knobs.language.default_fp_fusion, chosen = False, knobs.language.default_fp_fusion
    case("other arithmetic by default", 90, contents, torch.ones(8))
    knobs.language.default_fp_fusion = chosen
    case("without a binary", 90, {role: contents[role] for role in ("source", "metadata")}, torch.ones(8))
    case("another binary", 90, {**contents, "cubin": contents["cubin"] + b"\0"}, torch.ones(8))
    case("another dtype", 90, contents, torch.ones(8, dtype=torch.float64))
    case("another alignment", 90, contents, torch.ones(9)[1:])
    case("another constant", 90, contents, torch.ones(8), BLOCK=8)
    case("other options", 90, contents, torch.ones(8), num_warps=4)
    case("too many programs", 90, contents, torch.ones(8), grid=[1 << 40])
    case("too many programs beside each other", 90, contents, torch.ones(8), grid=[1, 1 << 16])
    found["cases"] = cases
    found["often"] = launched_often(kernel, contents)
    found["with memory"] = with_memory(folder / "memory.opreplay")
    found["without sources"] = without_sources(folder / "without.opreplay")
    found["replayed"] = replayed(folder / "replayed.opreplay")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
