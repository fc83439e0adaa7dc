"""Memory that is a file: found while it is untouched, never while it is not, and without reading it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from replayfmt.recording.content import file_mappings
from replayfmt.recording.content.file_mappings import PAGE, FileMappings, MappedRange, read_mappings, written_pages

LENGTH = 8 * PAGE
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not tell of mappings")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights.bin"
    file.write_bytes(np.arange(LENGTH, dtype=np.uint8).tobytes())
    return file


def mapped(path: Path | str, length: int = LENGTH, shared: bool = False) -> torch.UntypedStorage:
    return torch.UntypedStorage.from_file(str(path), shared, length)


def find(storage: torch.UntypedStorage, offset: int = 0, length: int | None = None) -> MappedRange | None:
    return FileMappings().find(storage.data_ptr() + offset, (length or storage.nbytes()) - offset)


def test_an_untouched_private_mapping_is_the_files(path: Path) -> None:
    storage = mapped(path)
    found = find(storage, 300)
    assert found is not None
    status = path.stat()
    assert (found.path, found.offset, found.bytes, found.file_bytes) == (str(path), 300, LENGTH - 300, LENGTH)
    assert (found.identity.inode, found.identity.mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_reading_a_mapping_does_not_touch_it(path: Path) -> None:
    storage = mapped(path)
    assert bytes(storage[:4].tolist()) == b"\0\1\2\3"
    assert find(storage) is not None


def test_a_page_written_in_memory_is_no_longer_the_files(path: Path) -> None:
    storage = mapped(path)
    storage[3 * PAGE] = 7
    assert find(storage) is None
    before, after = find(storage, 0, 2 * PAGE), find(storage, 5 * PAGE)
    assert before is not None and after is not None


def test_a_neighbours_write_on_the_same_page_does_not_count(path: Path) -> None:
    storage = mapped(path)
    storage[100] = 99
    assert find(storage, 200) is not None
    assert find(storage, 100) is None


def test_a_deleted_file_cannot_be_referred_to(path: Path) -> None:
    storage = mapped(path)
    path.unlink()
    assert find(storage) is None


def test_a_file_that_took_anothers_name_is_not_taken_for_it(path: Path) -> None:
    storage = mapped(path)
    other = path.with_name("other")
    shutil.copy(path, other)
    os.replace(other, path)
    assert find(storage) is None


def test_a_file_that_became_shorter_does_not_hold_the_range(path: Path) -> None:
    storage = mapped(path)
    os.truncate(path, LENGTH // 2)
    assert find(storage) is None
    assert find(storage, 0, LENGTH // 4) is not None


def test_links_and_relative_paths_lead_to_the_real_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    monkeypatch.chdir(path.parent)
    through_link, relative = mapped(link), mapped("weights.bin")
    monkeypatch.chdir("/")
    for storage in (through_link, relative):
        found = find(storage)
        assert found is not None and found.path == os.path.realpath(path)


def test_names_with_blanks_and_line_breaks_are_found(path: Path) -> None:
    odd = path.with_name("two  blanks\nand a break (deleted)")
    path.rename(odd)
    found = find(mapped(odd))
    assert found is not None and found.path == str(odd)


def test_ordinary_memory_is_no_file(path: Path) -> None:
    assert find(torch.zeros(LENGTH).untyped_storage()) is None
    assert find(torch.from_numpy(np.zeros(LENGTH, np.uint8)).untyped_storage()) is None


def test_the_mappings_are_not_read_for_memory_that_the_system_says_is_no_files(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not file_mappings.holds_no_file(np.ones(1).ctypes.data, 8):
        pytest.skip("this system cannot be asked about an address")
    looked: list[int] = []
    original = read_mappings
    monkeypatch.setattr(file_mappings, "read_mappings", lambda: looked.append(1) or original())
    arrays = [np.ones(50_000 + size) for size in range(20)]
    assert all(FileMappings().find(each.ctypes.data, each.nbytes) is None for each in arrays)
    assert not looked
    assert find(mapped(path)) is not None
    assert looked


@pytest.mark.parametrize("query", [file_mappings._QUERY, 0])
def test_an_address_is_told_from_a_number(query: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no request that a system knows: then the mappings are read."""
    monkeypatch.setattr(file_mappings, "_QUERY", query)
    memory = mmap.mmap(-1, 3 * PAGE)
    first = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    assert file_mappings.is_mapped(first) and file_mappings.is_mapped(first + 3 * PAGE - 1)
    del memory
    gc.collect()
    assert not file_mappings.is_mapped(first)
    assert not file_mappings.is_mapped((1 << 62) + 5)


def test_small_arrays_in_ordinary_memory_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the system cannot be asked about an address.
    monkeypatch.setattr(file_mappings, "_ADDRESS_MAPS", "/nonexistent")
    file_mappings.heap_begin.cache_clear()
    mappings, looked = FileMappings(), []
    original = read_mappings
    monkeypatch.setattr(file_mappings, "read_mappings", lambda: looked.append(1) or original())
    whole = np.ones(64 * PAGE, np.uint8)  # so that what is in it lies together
    for batch in range(20):
        assert mappings.find(whole[batch * PAGE + 100 :].ctypes.data, 200) is None
    assert len(looked) == 1


def test_memory_of_the_heap_is_known_to_be_of_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What malloc hands out is not looked up."""
    try:
        begin, end = file_mappings.heap_begin(), file_mappings._sbrk(0)
    except OSError:
        pytest.skip("this system cannot be asked about an address")
    assert begin < end and file_mappings.holds_no_file(begin, end - begin)
    monkeypatch.setattr(file_mappings, "_ADDRESS_MAPS", "/nonexistent")
    assert file_mappings.holds_no_file(begin, end - begin)
    assert not file_mappings.holds_no_file(end - 8, 16)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = (ctypes.c_char * 8).from_buffer(mapped)
        assert not file_mappings.holds_no_file(ctypes.addressof(view), 8)
        del view


@pytest.mark.parametrize("maps", ["/proc/self/maps", "/nonexistent"])
def test_a_file_that_is_mapped_where_ordinary_memory_was_is_found(
    path: Path, maps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_mappings, "_ADDRESS_MAPS", maps)
    mappings = FileMappings()
    ordinary = mmap.mmap(-1, LENGTH)
    ordinary[:] = bytes([1]) * LENGTH
    view = (ctypes.c_char * LENGTH).from_buffer(ordinary)
    address = ctypes.addressof(view)
    assert mappings.find(address + 100, 200) is None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with open(path, "rb") as file:
        flags = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED: in its place
        placed = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(LENGTH),
            mmap.PROT_READ | mmap.PROT_WRITE,
            flags,
            file.fileno(),
            ctypes.c_long(0),
        )
    assert placed == address
    found = mappings.find(address + 100, 200)
    assert found is not None and found.offset == 100


def test_a_read_only_shared_mapping_is_the_files(path: Path) -> None:
    array = np.memmap(path, np.uint8, "r")
    assert FileMappings().find(array.ctypes.data, LENGTH) is not None


def test_a_shared_mapping_is_the_files_until_it_is_written(path: Path) -> None:
    if file_mappings._file_system(path.stat().st_dev) not in file_mappings._TELLING:
        pytest.skip("the file system of temporary files does not tell of writes to mappings")
    os.utime(path, ns=(1, 1))  # long ago, so that a write shows however slowly the file system's clock ticks
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    storage = mapped(path, shared=True)
    assert storage.filename == str(path)
    found = find(storage)
    assert found is not None
    before = found.fingerprint()
    storage[0] = 9
    assert found.fingerprint() != before
    assert find(storage) is None
    # Whoever maps it privately sees those writes, too.
    assert find(mapped(path)) is None


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory file system")
def test_shared_memory_is_no_file_to_refer_to_but_a_file_that_is_kept_there_is_one() -> None:
    name = f"/dev/shm/opreplay-test-{os.getpid()}"
    try:
        with open(name, "wb") as file:
            file.truncate(LENGTH)
        shared = mapped(name, shared=True)
        assert find(shared) is None
        private = mapped(name)
    finally:
        os.unlink(name)
    assert not FileMappings().is_file(shared.data_ptr(), LENGTH)
    assert FileMappings().is_file(private.data_ptr(), LENGTH)


def test_the_fingerprint_follows_the_content(path: Path) -> None:
    storage = mapped(path)
    found = find(storage)
    assert found is not None
    before = found.fingerprint()
    assert found.fingerprint() == before
    storage[PAGE] = 1
    changed = found.fingerprint()
    assert changed != before
    storage[PAGE] = 2
    assert found.fingerprint() not in (before, changed)


def test_the_fingerprint_follows_the_file(path: Path) -> None:
    storage = mapped(path)
    found = find(storage)
    assert found is not None
    before = found.fingerprint()
    with open(path, "r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    assert found.fingerprint() != before


def test_the_fingerprint_does_not_follow_a_neighbour(path: Path) -> None:
    storage = mapped(path)
    found = find(storage, 200)
    assert found is not None
    before = found.fingerprint()
    storage[100] = 99
    assert found.fingerprint() == before
    storage[200] = 99
    assert found.fingerprint() != before


def test_a_mapping_that_was_split_is_one_again(path: Path) -> None:
    storage = mapped(path)
    libc = ctypes.CDLL(None, use_errno=True)
    middle = ctypes.c_void_p(storage.data_ptr() + 2 * PAGE)
    assert libc.mprotect(middle, ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
    assert sum(mapping.path == str(path) for mapping in read_mappings()) == 3
    found = find(storage, 50)
    assert found is not None and found.offset == 50
    assert find(storage, 3 * PAGE) is not None


def test_a_mapping_is_remembered_only_while_its_memory_lives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = FileMappings()
    storage = mapped(path)
    alive: list[object] = [storage]
    found = mappings.find(storage.data_ptr(), LENGTH)
    assert found is not None
    mappings.keep(found, lambda: alive[0])
    looked = []
    monkeypatch.setattr(file_mappings, "read_mappings", lambda: looked.append(1) or [])
    assert mappings.find(storage.data_ptr() + 1, 10) is not None and not looked
    alive[0] = None
    assert mappings.find(storage.data_ptr() + 1, 10) is None and looked


def test_without_pagemap_smaps_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_mappings, "_PAGEMAP", "/nonexistent")
    storage = mapped(path)
    assert written_pages(storage.data_ptr(), 1) is None
    found = find(storage)
    assert found is not None and found.fingerprint() is None
    storage[0] = 1
    assert find(storage) is None
    monkeypatch.setattr(file_mappings, "_SMAPS", "/nonexistent")
    assert find(mapped(path)) is None


def test_a_file_with_other_numbers_than_its_mapping_is_recognized(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on layered file systems, where stat and the mappings disagree."""
    original = read_mappings

    def elsewhere() -> list[file_mappings.Mapping]:
        return [file_mappings.replace(mapping, device="00:99") for mapping in original()]

    monkeypatch.setattr(file_mappings, "read_mappings", elsewhere)
    storage = mapped(path)
    assert find(storage) is not None
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    assert find(storage) is None


def test_in_layers_a_copy_that_took_over_the_name_is_another_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount layers")
    names = ("lower", "upper", "work", "merged")
    lower, upper, work, merged = (tmp_path / name for name in names)
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    for name in ("kept", "written"):
        (lower / name).write_bytes(bytes(LENGTH))
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], capture_output=True)
    if done.returncode:
        pytest.skip("layers cannot be mounted here")
    try:
        kept, written = mapped(merged / "kept"), mapped(merged / "written")
        with open(merged / "written", "r+b") as file:  # makes the copy
            file.write(b"other")
        assert find(kept) is not None
        assert find(written) is None and written[0] == 0
        del kept, written
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", merged], check=True)


def test_a_file_that_was_touched_lately_is_compared_where_mapping_and_name_may_differ(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    original = file_mappings._same_as_file
    monkeypatch.setattr(file_mappings, "_same_as_file", lambda *args: compared.append(1) or original(*args))
    monkeypatch.setattr(file_mappings, "_file_system", lambda device: "fuse")
    storage = mapped(path)
    assert find(storage) is not None and compared
    compared.clear()
    monkeypatch.setattr(file_mappings, "_process_start", lambda: path.stat().st_ctime + 60)
    assert find(storage) is not None and not compared


def test_gigabytes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.bin"
    monkeypatch.setattr(file_mappings, "_process_start", lambda: path.stat().st_ctime + 60)  # as files mostly are
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    storage = mapped(path, 3 << 30)
    found = find(storage)
    assert found is not None and found.fingerprint() is not None
    assert file_mappings.mapping_sizes(storage.data_ptr())["Rss"] == 0
