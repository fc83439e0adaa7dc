"""Storages whose bytes are in a file are references: with every loader, as long as nobody wrote to them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.recording.content import file_mappings
from replayfmt.recording.content.storage_content import is_readable

from .conftest import Capture, Captured
from .external import origins, payload_bytes, range_bytes, ranges

Weights = dict[str, torch.Tensor]
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not tell of mappings")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(40, 40, generator=generator) for name in ("up", "down")}


@pytest.fixture
def saved(weights: Weights, tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    return path


def forward(loaded: Weights) -> torch.Tensor:
    return torch.relu(torch.ones(2, 40) @ loaded["up"]) @ loaded["down"]


def from_archive(path: Path) -> Weights:
    archive = path.with_suffix(".pt")
    if not archive.exists():
        torch.save(load_file(path), archive)
    return torch.load(archive, mmap=True)


def from_safe_open(path: Path) -> Weights:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


@pytest.mark.parametrize("load", [load_file, from_archive, from_safe_open])
def test_mapped_checkpoints_are_referred_to(
    capture: Capture, saved: Path, weights: Weights, load: Callable[[Path], Weights]
) -> None:
    loaded = load(saved)
    captured = capture(lambda: forward(loaded), digests="ops")
    assert origins(captured) == ["external_file"] * 2
    assert range_bytes(captured) == [raw(weights["up"]), raw(weights["down"])]
    file, _ = ranges(captured)[0]
    status = os.stat(file.path)
    assert file.bytes == status.st_size and file.identity is not None and file.digest is None and not file.payload
    assert file.identity.inode == status.st_ino and file.identity.mtime_ns == status.st_mtime_ns
    assert file.format == ("torch" if load is from_archive else "safetensors")
    assert not any(raw(weights["up"])[:64] in content for content in payload_bytes(captured))
    assert captured.unsupported() == {}
    first = captured.records(RecordKind.storage_import)[0]
    assert (first.argument("payload").id, first.argument("reason")) == (1, "mapped_file")


def test_what_was_written_in_memory_is_embedded(capture: Capture, saved: Path) -> None:
    loaded = from_archive(saved)
    loaded["down"][3, 3] = 17
    captured = capture(lambda: forward(loaded))
    assert origins(captured) == ["external_file", "payload"]
    assert payload_bytes(captured) == [raw(loaded["down"])]


def test_a_loaded_tensor_that_its_loader_wrote_is_not_the_files(capture: Capture, saved: Path) -> None:
    def program() -> Any:
        loaded = load_file(saved)
        loaded["up"].mul_(2)
        return forward(loaded)

    captured = capture(program)
    assert "external_file" in origins(captured) and captured.unsupported() == {}


def test_a_deleted_file_is_embedded(capture: Capture, saved: Path) -> None:
    loaded = load_file(saved)
    saved.unlink()
    captured = capture(lambda: forward(loaded))
    assert origins(captured) == ["payload"] * 2


def test_the_path_is_the_real_one(capture: Capture, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved.parent / "latest").symlink_to(saved)
    monkeypatch.chdir(saved.parent)
    loaded = {**load_file("latest"), "up": load_file("weights.safetensors")["up"]}
    captured = capture(lambda: forward(loaded))
    assert {file.path for file, _ in ranges(captured)} == {os.path.realpath(saved)}


def test_raw_files_are_referred_to(capture: Capture, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.int64).tofile(path)
    tokens = torch.from_file(str(path), shared=False, size=900, dtype=torch.int64)
    captured = capture(lambda: tokens[:10] + 1)
    assert ranges(captured)[0][1].bytes == 7200 and ranges(captured)[0][0].format == "raw"


def test_training_mapped_weights_keeps_the_reference(capture: Capture, saved: Path, weights: Weights) -> None:
    from_archive(saved)  # writes it

    def program() -> Any:
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in from_archive(saved).items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            forward(parameters).sum().backward()
            optimizer.step()
        return parameters

    captured = capture(program)
    assert origins(captured) == ["external_file"] * 2
    assert len(captured.records(RecordKind.storage_import)) == 2
    assert len(captured.records(RecordKind.digest)) >= 2
    trained = torch.load(saved.with_suffix(".pt"))
    assert torch.equal(trained["up"], weights["up"])  # the file is as it was


def test_a_write_from_outside_enters_again_with_its_bytes(capture: Capture, saved: Path) -> None:
    loaded = from_archive(saved)
    view = loaded["up"].numpy()

    def program() -> Any:
        first = forward(loaded)
        view[0] = 3.0
        return first, forward(loaded)

    captured = capture(program, digests="ops")
    imports = [(r.argument("version"), r.argument("reason")) for r in captured.records(RecordKind.storage_import)]
    assert imports == [(0, "mapped_file"), (0, "mapped_file"), (1, "outside_write")]
    assert payload_bytes(captured) == [raw(loaded["up"])]


def test_a_file_that_was_modified_meanwhile_makes_the_capture_unsupported(capture: Capture, saved: Path) -> None:
    loaded = load_file(saved)

    def program() -> Any:
        first = forward(loaded)
        with open(saved, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        os.utime(saved, ns=(1, 1))
        return first

    captured = capture(program)
    assert captured.unsupported() == {"file_changed": 1}
    detail = captured.records(RecordKind.unsupported)[0].argument("detail")
    assert str(saved) in detail and "was modified" in detail


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_was_replaced_or_removed_meanwhile_is_embedded(capture: Capture, saved: Path, gone: bool) -> None:
    loaded = load_file(saved)

    def program() -> Any:
        first = forward(loaded)
        saved.unlink()
        if not gone:
            save_file({"other": torch.zeros(1)}, saved)
        return first, forward(loaded)

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()
    assert len(captured.records(RecordKind.storage_import)) == 2  # the program's memory is what it was


_TRUNCATING = """
import os, sys, torch, replayfmt
from pathlib import Path
path = Path(sys.argv[1])
path.write_bytes(bytes(1 << 16))
numbers = torch.from_file(str(path), shared=False, size=1 << 14)
with replayfmt.capture(sys.argv[2], **eval(sys.argv[3])):
    numbers[:8].sum()
    numbers.add_(1)
    os.truncate(path, 1 << 13)
    numbers[:8].sum()           # the file still has these
    path.unlink()
    print(numbers[:8].sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["{}", "{'payload': 'integers'}", "{'audit': True}", "{'digests': 'ops'}"])
def test_recording_does_not_touch_memory_that_a_shorter_file_took_away(tmp_path: Path, options: str) -> None:
    if not is_readable_told():
        pytest.skip("the system does not tell what can be read")
    path = tmp_path / "short.opreplay"
    done = subprocess.run(
        [sys.executable, "-c", _TRUNCATING, str(tmp_path / "numbers.bin"), str(path), options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "8.0\n"), done.stderr
    assert Captured(path, None).unsupported()["foreign_memory"] == 1


def is_readable_told() -> bool:
    """Whether this system says that the memory of a file that was made shorter cannot be read."""
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        memory = mmap.mmap(file.fileno(), 1 << 16, access=mmap.ACCESS_COPY)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        os.ftruncate(file.fileno(), 0)
        return not is_readable(storage)


def test_gigabytes_are_neither_read_nor_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.bin"
    # Files are mostly older than the process; others are compared on some file systems.
    monkeypatch.setattr(file_mappings, "_process_start", lambda: path.stat().st_ctime + 60)
    length = 3 << 30
    with open(path, "wb") as file:
        file.truncate(length)
    storage = torch.UntypedStorage.from_file(str(path), False, length)
    weights = torch.tensor([]).set_(storage)
    with replayfmt.capture(tmp_path / "step.opreplay"):
        for row in range(4):
            weights[row * 1000 : row * 1000 + 10].sum()
    sizes = file_mappings.mapping_sizes(storage.data_ptr())
    assert sizes is not None and sizes["Rss"] < 64 << 20 and sizes["Anonymous"] == 0
    assert (tmp_path / "step.opreplay").stat().st_size < 1 << 20
    assert origins(Captured(tmp_path / "step.opreplay", None)) == ["external_file"]


def test_without_mappings_the_name_of_a_storage_is_looked_at(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_mappings, "_MAPS", "/nonexistent")
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.int64).tofile(path)
    tokens, other = (torch.from_file(str(path), shared=True, size=900, dtype=torch.int64) for _ in range(2))
    private = torch.from_file(str(path), shared=False, size=900, dtype=torch.int64)
    captured = capture(lambda: (tokens + 1, private + 1))
    assert origins(captured) == ["external_file", "payload"]
    path.unlink()
    assert origins(capture(lambda: other + 1)) == ["payload"]


def test_batches_from_numpy_are_no_files(capture: Capture) -> None:
    batch = torch.from_numpy(np.zeros((64, 64)))
    assert origins(capture(lambda: batch + 1)) == ["payload"]
