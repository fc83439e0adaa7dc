"""Files that the user names: which ranges they have, and which storages are copies of one."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from replayfmt.errors import UsageError
from replayfmt.pytorch.tensors.memory import host_view
from replayfmt.recording.known_files import KnownFiles, expand, format_of, look_at

TENSORS = {"a": torch.arange(300.0), "b": torch.arange(40), "empty": torch.zeros(0)}


def place_of(tensor: torch.Tensor, *paths: Path) -> tuple[str, int] | None:
    """Where a copy of a tensor's storage is in some files."""
    storage = tensor.clone().untyped_storage()
    found = KnownFiles(tuple(map(str, paths))).find(storage.nbytes(), xxhash.xxh3_128_intdigest(host_view(storage)))
    return None if found is None else (found[0].path, found[1])


def holds(path: Path, offset: int, tensor: torch.Tensor) -> bool:
    raw = bytes(host_view(tensor.untyped_storage()))
    return path.read_bytes()[offset : offset + len(raw)] == raw


def test_tensors_of_safetensors_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    assert format_of(str(path)) == "safetensors"
    for name in "ab":
        found = place_of(TENSORS[name], path)
        assert found is not None and holds(path, found[1], TENSORS[name])
    assert place_of(TENSORS["a"] + 1, path) is None


def test_links_to_files_with_other_names_are_what_they_hold(tmp_path: Path) -> None:
    """As in a hub's cache, where a snapshot links to blobs that are called by their hash."""
    save_file(TENSORS, tmp_path / "0a1b2c")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../0a1b2c")
    (path,) = expand([tmp_path / "snapshot"])
    assert look_at(path).format == format_of(path) == "safetensors"
    found = place_of(TENSORS["b"], Path(path))
    assert found is not None and holds(tmp_path / "0a1b2c", found[1], TENSORS["b"])


def test_what_only_begins_like_a_safetensors_file_is_raw(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes((20).to_bytes(8, "little") + b"{" + bytes(100))
    assert look_at(str(path)).format == "raw"


def test_storages_of_saved_archives_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(TENSORS, path)
    assert look_at(str(path)).format == "torch"
    for name in "ab":
        found = place_of(TENSORS[name], path)
        assert found is not None and holds(path, found[1], TENSORS[name])


def test_any_other_file_is_one_range(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(host_view(TENSORS["b"].untyped_storage())))
    assert place_of(TENSORS["b"], path) == (str(path), 0)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "text")
    assert look_at(str(tmp_path / "other.zip")).format == "raw"


def test_a_range_is_hashed_only_when_its_length_shows_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    files = KnownFiles((str(path),))
    read: list[int] = []
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read.append(at) or original(fd, into, at))
    assert not files.has_length(77) and files.find(77, 0) is None and not read
    assert files.find(1200, 0) is None and files.find(1200, 1) is None
    assert len(read) == 1


def test_a_file_that_changed_since_is_not_referred_to(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    files = KnownFiles((str(path),))
    os.utime(path, ns=(1, 1))
    digest = xxhash.xxh3_128_intdigest(host_view(TENSORS["a"].untyped_storage()))
    assert files.find(1200, digest) is None


def test_directories_and_indexes_stand_for_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: TENSORS[key]}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}))
    (tmp_path / "config.json").write_text("{}")
    shards = tuple(os.path.realpath(tmp_path / name) for name in names)
    assert expand([tmp_path]) == expand([index]) == shards
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(names[1])
    assert expand(["link", names[1]]) == shards[1:]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "weight_map"),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "No such file"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, content: str, said: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(UsageError, match=said):
        expand([index])


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        expand([tmp_path / "missing.bin"])
    with pytest.raises(UsageError, match="holds no .safetensors"):
        expand([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        expand([tmp_path / "pipe"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,400],"dtype":"F32","shape":[100]}}  ' + b"1234",
    ],
)
def test_what_only_says_it_is_a_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a safetensors file"):
        look_at(str(path))


def test_a_damaged_archive_is_a_raw_file(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-30])
    assert look_at(str(path)).ranges == ((0, path.stat().st_size),)
