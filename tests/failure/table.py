"""The failure contract as a table: a situation, a real program that gets into it, and what every tool has to say.

`make` captures the program and gives what the tools are called with. A situation of the strict contract is refused
before the first op: exit code 1, nothing on stdout, one line of error and one for each finding.
"""

from __future__ import annotations

import contextlib
import shutil
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from replay.externals import content_file, externalize, imported_payloads
from replay.rewriting import rewrite
from unseen import write_unseen

import replayfmt


@dataclass(frozen=True)
class Row:
    """One situation. `said` are patterns of regular expressions, one for each finding that must be there; `dumped` are
    jq filters that have to give `true` for a row of the dump; `shown` is text of the dump's summary."""

    name: str
    make: Callable[[Path, pytest.MonkeyPatch], tuple[Path, list[str]]]
    said: tuple[str, ...]
    dumped: str = ""
    shown: str = ""


def recorded(folder: Path, program: Callable[[], Any], name: str = "capture", **options: Any) -> Path:
    """Capture a program's one scope. What the program returns lives until the scope ends."""
    path = folder / f"{name}.opreplay"
    options.setdefault("digests", "none" if options.get("payload") == "none" else "live")
    with replayfmt.capture(path, **options), replayfmt.scope("execute"):
        returned = program()
    del returned
    return path


def of(program: Callable[[], Any], **options: Any) -> Callable[[Path, pytest.MonkeyPatch], tuple[Path, list[str]]]:
    return lambda folder, _patch: (recorded(folder, program, **options), [])


# ------------------------------------------------------------------------------------------------------- external files


def _referring(
    folder: Path, validation: str, change: Callable[[Path], Any], flags: list[str]
) -> tuple[Path, list[str]]:
    """A capture that refers to a file of weights, which is then changed."""
    weight = torch.arange(64.0)
    source = recorded(folder, lambda: weight * 2, "embedded")
    content = folder / "weights" / "w.bin"
    with replayfmt.open(source) as capture:
        payloads = imported_payloads(capture.reader)
    offsets = content_file(source, content, only=payloads)
    target = externalize(source, folder / "refers.opreplay", {content: offsets}, validation)
    change(content)
    return target, flags


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def _copied(path: Path) -> None:
    shutil.copytree(path.parent, path.parent.with_name("elsewhere"))


def _file_missing(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    content = folder / "weights" / "w.bin"
    content.parent.mkdir()
    content.write_bytes(bytes(range(256)) * 64)
    weight = torch.from_file(str(content), shared=False, size=4096, dtype=torch.float32)
    path = recorded(folder, lambda: weight * 2)
    content.unlink()
    return path, []


def _file_changed(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    return _referring(folder, "digest", _flipped, [])


def _file_is_another(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    flags = [f"--replay-file-remap={folder}/weights={folder}/elsewhere"]
    return _referring(folder, "identity", _copied, flags)


# ------------------------------------------------------------------------------------------------------------ operators


@contextlib.contextmanager
def operator(namespace: str, keys: tuple[str, ...] = ("CompositeExplicitAutograd",)) -> Iterator[Any]:
    """A custom operator `twice`, which is there for as long as this lasts."""
    library = torch.library.Library(namespace, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    for key in keys:
        library.impl("twice", lambda x: x.mul(2), key)
    try:
        yield getattr(torch.ops, namespace).twice
    finally:
        library._destroy()


def _operator_is_gone(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    x = torch.ones(3)
    with operator("failure_gone") as twice:
        return recorded(folder, lambda: (twice(x), twice(x + 1))), []


def _operator_is_for_another_device(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    x = torch.ones(3)
    with operator("failure_elsewhere", ("CPU",)) as twice:
        path = recorded(folder, lambda: twice(x))
    _keep(patch, operator("failure_elsewhere", ("CUDA",)))
    return path, []


def _library_cannot_be_imported(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    (folder / "broken_operators.py").write_text("raise OSError('its shared library is for another system')\n")
    patch.syspath_prepend(str(folder))
    return _operator_is_gone(folder, patch)[0], ["--allow-import=broken_operators"]


def _keep(patch: pytest.MonkeyPatch, manager: Any) -> Any:
    """Enter a context for the rest of the test."""
    entered = manager.__enter__()

    class Leaving(dict[str, Any]):
        def __delitem__(self, key: str) -> None:
            super().__delitem__(key)
            manager.__exit__(None, None, None)

    patch.setitem(Leaving(), "until the end of the test", entered)
    return entered


def _content_of_unknown_role(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Integers whose meaning only the operator knows: indices, lengths, or anything else."""
    numbers = torch.tensor([3, 1, 1])
    twice = _keep(patch, operator("failure_integers"))
    return recorded(folder, lambda: twice(numbers), payload="none"), []


# ---------------------------------------------------------------------------------------------------------- unsupported


def _compiled() -> None:
    torch.compile(lambda x: (x.sin() + 1) * 2)(torch.ones(8))


def _written_unseen() -> torch.Tensor:
    memory = torch.empty(4)
    write_unseen(memory)
    return memory + 1


def _opaque() -> None:
    torch.ones(3, dtype=torch.uint64).fill_(2**63 + 1)


def _triton_launch(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A launch through Triton's own entry, of which there is a stand-in where Triton is not installed."""
    import sys

    class JITFunction:
        def __init__(self, fn: Callable[..., Any]) -> None:
            self.fn = fn

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *args: self.run(*args, grid=grid, warmup=False)

        def run(self, *args: Any, grid: Any, warmup: bool) -> Any:
            return self.fn(*args)

    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules["triton.runtime.jit"])["JITFunction"] = JITFunction

    def fused_kernel(x: torch.Tensor) -> None:
        x.numpy()[:] = 7

    return recorded(folder, lambda: JITFunction(fused_kernel)[(1,)](torch.ones(3))), []


def _cuda_graph(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    class CUDAGraph:
        def capture_begin(self) -> None: ...

        def capture_end(self) -> None: ...

        def replay(self) -> None:
            torch.ones(3)

    patch.setattr(torch.cuda.graphs, "CUDAGraph", CUDAGraph)
    patch.setattr(torch._C, "_CUDAGraph", CUDAGraph)  # the base, which is hooked where PyTorch is built for CUDA

    def program() -> None:
        torch.ones(2)
        CUDAGraph().replay()

    return recorded(folder, program), []


def _mode_beneath() -> None:
    """A mode that comes between the recorder and the kernels, and does as it likes with what is called."""
    from torch.utils import _python_dispatch as dispatch

    class Negating(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return -func(*args, **(kwargs or {}))

    x = torch.ones(3)
    recorder = dispatch._get_current_dispatch_mode()
    assert recorder is not None
    with dispatch._disable_current_modes(), Negating(), recorder:
        x.exp()


def _symbolic() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    library = torch.library.Library("failure_symbolic", "DEF")
    library.define("moved(Tensor x, SymInt by) -> Tensor")
    library.impl("moved", lambda x, by: x + 1, "CPU")
    try:
        torch.ops.failure_symbolic.moved(torch.ones(3), ShapeEnv().create_unbacked_symint())
    finally:
        library._destroy()


def _overlapping() -> None:
    import numpy as np

    array = np.zeros(16, np.uint8)
    whole = torch.from_numpy(array)
    part = torch.from_numpy(array[2:10])
    whole + 1
    part + 1
    part.view(torch.float32) + whole.sum()  # its elements are no elements of the storage that it is a part of


def _collective(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # others need a network interface
    try:
        return recorded(folder, lambda: dist.all_reduce(torch.ones(3).to_sparse())), []
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- devices, unclosed ones


def _device_is_not_here(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    from replayfmt.format.model import Device

    source = recorded(folder, lambda: torch.ones(3).exp(), "here")
    return rewrite(source, folder / "there.opreplay", device=lambda _device: Device("cuda", 7, "Somebody's GPU")), []


def _never_closed(folder: Path, _patch: Any) -> tuple[Path, list[str]]:
    recorder = replayfmt.Recorder(folder / "open.opreplay")
    recorder.start()
    try:
        torch.ones(3).exp()
        assert recorder._core is not None
        recorder._core.flush()
        left = folder / "left.opreplay"
        shutil.copyfile(folder / "open.opreplay.partial", left)  # what a killed process leaves
    finally:
        recorder.close()
    return left, []


def unsupported(reason: str, op: str, make: Callable[..., tuple[Path, list[str]]], detail: str = "") -> Row:
    """A row of the kinds of unsupported records."""
    return Row(
        reason,
        make,
        (rf"^unsupported, {reason}: {op}.*ordinal.*{detail}",),
        f'select(.kind=="unsupported" and .reason=="{reason}") | (.detail | length > 0)',
        rf"unsupported   .*{reason}",
    )


REFUSED = (
    Row(
        "a referenced file is missing",
        _file_missing,
        (r"w\.bin does not exist.*--replay-file-remap=CAPTURED=REPLAY",),
        'select(.kind=="external_file") | .path | endswith("weights/w.bin")',
    ),
    Row(
        "a referenced file was changed",
        _file_changed,
        (r"w\.bin has other content than the captured one: its digest is \w+, expected \w+",),
        'select(.kind=="external_file") | .digest | length == 32',
    ),
    Row(
        "a remap leads to another file",
        _file_is_another,
        (
            r"elsewhere/w\.bin \(captured as .*weights/w\.bin\) is not known to be the captured one: .*"
            r"--file-validation=digest.*--add-digests",
        ),
        'select(.kind=="external_file") | .identity.inode > 0',
    ),
    Row(
        "an operator is not in this build",
        _operator_is_gone,
        (
            r"^failure_gone::twice\.default does not exist in torch .*--allow-import=MODULE; called 2 times, first at "
            r"ordinals \d+, \d+$",
        ),
        'select(.kind=="kernel") | select(.name=="failure_gone::twice") | .calls == 2',
    ),
    Row(
        "an operator is not for this device",
        _operator_is_for_another_device,
        (r"^failure_elsewhere::twice\.default has no kernel for cpu in this torch; called once",),
        'select(.kind=="kernel") | .name == "failure_elsewhere::twice"',
    ),
    Row(
        "an operator's library cannot be imported",
        _library_cannot_be_imported,
        (
            r"^--allow-import=broken_operators: it cannot be imported: OSError: its shared library",
            r"^failure_gone::twice\.default does not exist",
        ),
        'select(.kind=="kernel") | select(.name=="failure_gone::twice") | .calls == 2',
    ),
    unsupported(
        "unseen_write", "aten::add", of(_written_unseen), "something that the capture does not see has written it"
    ),
    unsupported(
        "mkldnn_layout",
        "mkl::_mkl_reorder_linear_weight",
        of(lambda: torch.ops.mkl._mkl_reorder_linear_weight(torch.randn(4, 4), 2)),
        "weight_prepack",
    ),
    unsupported("opaque_argument", "aten::fill_", of(_opaque)),
    unsupported(
        "symbolic_argument",
        "failure_symbolic::moved",
        of(_symbolic, whole="failure_symbolic::moved"),
        "without a concrete value",
    ),
    unsupported("compiled_region", "torch.compile", of(_compiled, compiled="keep"), "--compiled=eager"),
    unsupported("triton_launch", ".*fused_kernel", _triton_launch, "was launched"),
    unsupported("cuda_graph", "CUDAGraph.replay", _cuda_graph),
    unsupported(
        "host_call",
        "aten::exp",
        of(_mode_beneath, recorder="python"),
        "another dispatch mode lies beneath the recorder",
    ),
    unsupported("overlapping_storages", "", of(_overlapping)),
    unsupported(
        "collective",
        "c10d::allreduce_",
        _collective,
        r"its tensors are not strided; group '\w+' of 1 rank \(0\), this is rank 0 of it",
    ),
    Row(
        "content is not in the capture and nothing can stand for it",
        _content_of_unknown_role,
        (r"storage \d+.*failure_integers::twice.*--replay-initializer",),
        'select(.kind=="storage") | .origin == "absent"',
    ),
    Row(
        "captured devices are not here",
        _device_is_not_here,
        (r"cuda:7 \(Somebody's GPU\), which is not here.*--device=",),
        'select(.kind=="device") | .name == "Somebody\'s GPU"',
    ),
    Row(
        "the capture was never closed",
        _never_closed,
        (r"the capture is incomplete \(.*\); --allow-incomplete replays what is there",),
        'select(.kind=="file") | .complete == false',
        r"complete      no",
    ),
)
