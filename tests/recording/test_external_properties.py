"""Whatever is written to mapped memory, in whatever order: what is said to be the file's is the file's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.pytorch.tensors.memory import memory_at
from replayfmt.recording.content.file_mappings import PAGE, FileMappings

LENGTH = 6 * PAGE
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="the system does not tell of pages")
places = st.integers(0, LENGTH - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mapped") / "weights.bin"
    file.write_bytes(np.random.default_rng(0).bytes(LENGTH))
    return file


def held(storage: torch.UntypedStorage, begin: int, end: int) -> bytes:
    return bytes(memory_at(storage.data_ptr() + begin, end - begin))


@pytest.mark.slow
@settings(max_examples=150)
@given(writes=st.lists(st.tuples(places, st.integers(0, 255)), max_size=4), ends=st.tuples(places, places))
def test_a_range_is_the_files_only_if_its_bytes_are(
    path: Path, writes: list[tuple[int, int]], ends: tuple[int, int]
) -> None:
    content = path.read_bytes()
    storage = torch.UntypedStorage.from_file(str(path), False, LENGTH)
    begin, end = min(ends), max(ends) + 1
    for place, value in writes:
        storage[place] = value
    found = FileMappings().find(storage.data_ptr() + begin, end - begin)
    now = held(storage, begin, end)
    if found is not None:
        assert (found.offset, found.bytes) == (begin, end - begin) and now == content[begin:end]
    if not any(begin // PAGE <= place // PAGE <= (end - 1) // PAGE for place, _ in writes):
        assert found is not None  # nobody wrote near it


@pytest.mark.slow
@given(
    before=st.lists(places, max_size=3), later=st.tuples(places, st.integers(1, 255)), ends=st.tuples(places, places)
)
def test_a_fingerprint_changes_exactly_with_the_bytes(
    path: Path, before: list[int], later: tuple[int, int], ends: tuple[int, int]
) -> None:
    storage = torch.UntypedStorage.from_file(str(path), False, LENGTH)
    begin, end = min(ends), max(ends) + 1
    found = FileMappings().find(storage.data_ptr() + begin, end - begin)
    assert found is not None
    for place in before:
        storage[place] = 7
    first, content = found.fingerprint(), held(storage, begin, end)
    assert found.fingerprint() == first
    place, value = later
    storage[place] = (storage[place] + value) % 256
    changed = held(storage, begin, end) != content
    assert (found.fingerprint() != first) == changed
