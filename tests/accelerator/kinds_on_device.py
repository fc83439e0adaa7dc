"""What is asked of accelerators of any kind. Run by test_accelerator.py after on_device.py, in its process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools, tools  # noqa: F401 - a fixture
from on_device import devices_as_they_were, native_alone, ops, recorder, sim  # noqa: F401 - fixtures of every test

import replayfmt
from replayfmt import Plan
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.pytorch.tensors import memory


def test_what_a_scope_left_on_another_stream_is_digested_when_it_is_there(tmp_path: Path) -> None:
    def program() -> list[float]:
        main, other = torch.accelerator.current_stream("sim:0"), torch.Stream("sim:0")
        with replayfmt.scope("execute"):
            x = torch.ones(4, device="sim:0")
            other.wait_stream(main)
            with other:
                y = x + 1
        main.wait_stream(other)
        return y.tolist()  # type: ignore[no-any-return]

    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        assert program() == [2] * 4
    records = open_capture(path).summary.records
    assert records[RecordKind.digest] >= 2
    assert not records.get(RecordKind.synchronize), "the recorder's own wait is not the program's"
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:  # type: ignore[arg-type]
            assert plan.execute(verify="bitwise").outcome == "ok"
    assert sim.races() == 0


@torch.library.custom_op("off::second", mutates_args=())
def second(x: torch.Tensor) -> torch.Tensor:
    return x + x.device.index


@native_alone
def test_repeated_replays_on_several_devices_name_what_differs_between_them(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        torch.ops.off.second(torch.ones(4, device="sim:0").add(1)).sum().item()
    ran = tools("run", "--repeat=2", "--device=sim:0", "--device=sim:1", path)
    assert ran.code == 1 and "4 replays on sim:0, sim:1 in turn" in ran.out
    assert "devices differ: " in ran.out and "(off::second.default) is the first that differs between" in ran.out
    assert tools("run", "--repeat=2", "--device=sim:1", path).out.splitlines()[-1].startswith("deterministic: ")


@torch.library.custom_op("off::poke", mutates_args=("x",))
def poke(x: torch.Tensor) -> None:
    """In a replay, also writes four bytes behind the memory of its argument."""
    if pokes:
        end = x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
        past: Any = torch._C._construct_storage_from_data_pointer(end, x.device, 4)
        torch.empty(0, device=x.device).set_(past, 0, (1,), (1,)).fill_(1)
    x.add_(1)


pokes = False


@native_alone
def test_a_guarded_replay_names_what_writes_beside_its_argument(
    tmp_path: Path,
    tools: Tools,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        poke(torch.rand(6, device="sim:0").mul_(3))
    ran = tools("run", "--guard", path)
    assert ran.code == 0 and "between canaries: none writes memory beside its arguments" in ran.out + ran.err
    monkeypatch.setattr(sys.modules[__name__], "pokes", True)
    ran = tools("run", "--guard", path)
    assert ran.code == 1 and any("off::poke" in each and "after argument x (wrote)" in each for each in ran.findings)


def test_content_travels_through_pinned_memory_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(memory, "_WORTH_PINNING", 1 << 12)
    through, path = list[int](), memory._through_pinned_memory
    monkeypatch.setattr(
        memory, "_through_pinned_memory", lambda storage, *rest: (through.append(1), path(storage, *rest))
    )
    content = bytes(range(256)) * 41  # two pieces and a rest
    storage = torch.UntypedStorage(len(content), device="sim:1")

    def read(into: memoryview, start: int) -> None:
        into[:] = content[start : start + len(into)]

    memory.fill_from(storage, len(content), read)
    assert through and b"".join(map(bytes, memory.pieces(storage))) == content
    monkeypatch.setattr(memory, "pins_memory", lambda _kind: False)
    memory.fill_from(storage, len(content), read)
    assert len(through) == 1 and b"".join(map(bytes, memory.pieces(storage))) == content


def test_a_custom_operator_computes_under_the_devices_autocast_as_it_did(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    @torch.library.custom_op("simcast::project", mutates_args=())
    def project(x: torch.Tensor) -> torch.Tensor:
        product = x @ x
        seen.append(product.dtype)
        return product.float()

    def program() -> Any:
        x = torch.ones(2, 2, device="sim:0")
        with torch.autocast("sim", dtype=torch.bfloat16):
            cast = project(x)
        return cast, project(x)

    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        kept = program()
    assert len(kept) == 2
    assert open_capture(path).session.settings["autocast.sim"] == ""
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
    assert seen == [torch.bfloat16, torch.float32] * 2


def test_a_composite_that_the_device_has_a_kernel_for_is_one_op(tmp_path: Path) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("cosine_similarity", lambda x, y, *_rest: (x * y).sum(-1), "PrivateUse1")
    path = tmp_path / "a.opreplay"
    x = torch.full((2, 3), 2.0, device="sim:0")
    with torch.inference_mode():
        expected = torch.cosine_similarity(x, x).tolist()
        with replayfmt.capture(path):
            assert torch.cosine_similarity(x, x).tolist() == expected == [12, 12]
    assert "aten::cosine_similarity" in {name for name, _ in ops(path)}
    library._destroy()


def test_what_the_profiler_does_not_show_of_a_device_is_refused(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        torch.ones(2, device="sim:0") + 1
    flags = ["--device-profiling-mode=device-kernels", f"--device-profiling-output={tmp_path / 'trace.json'}"]
    done = tools("benchmark", *flags, "--benchmark-min-time=1x", path)
    assert done.code == 2 and "profiler has no support of sim" in done.err, done.err
    done = tools("run", "--device=nonsense", path)
    assert done.code == 2 and "not a device; available: cpu, sim:0, sim:1" in done.err
