"""Remaps: what each CAPTURED=REPLAY does to a captured path, and which are refused."""

from __future__ import annotations

import pytest

from replayfmt.errors import UsageError
from replayfmt.format.external_files import FileRemaps


@pytest.mark.parametrize(
    ("remaps", "captured", "replay"),
    [
        ([], "/mnt/a/model.bin", "/mnt/a/model.bin"),
        (["/mnt/a=/data"], "/mnt/a/model.bin", "/data/model.bin"),
        (["/mnt/a=/data"], "/mnt/ab/model.bin", "/mnt/ab/model.bin"),
        (["/mnt/a=/data"], "/mnt/a", "/data"),
        (["/mnt/a/model.bin=/data/other.bin"], "/mnt/a/model.bin", "/data/other.bin"),
        (["/mnt/a/=/data/"], "/mnt/a/model.bin", "/data/model.bin"),
        (["/=/root2"], "/mnt/a/model.bin", "/root2/mnt/a/model.bin"),
        (["/mnt=/"], "/mnt/a/model.bin", "/a/model.bin"),
        (["/mnt=/short", "/mnt/a=/long"], "/mnt/a/model.bin", "/long/model.bin"),
        (["/mnt/a=/long", "/mnt=/short"], "/mnt/a/model.bin", "/long/model.bin"),
        (["/mnt/a=/data", "/data=/elsewhere"], "/mnt/a/model.bin", "/data/model.bin"),
        (["/a=/b", "/b=/a"], "/a/x", "/b/x"),
        (["/a=/b", "/b=/a"], "/b/x", "/a/x"),
        (["/a=/a/a"], "/a/x", "/a/a/x"),
        (["/mnt/a="], "/mnt/a/models/model.bin", "models/model.bin"),
        (["models=/data"], "models/model.bin", "/data/model.bin"),
        (["models=/data"], "./models//model.bin", "/data/model.bin"),
        (["models=/data"], "/models/model.bin", "/models/model.bin"),
        ([".=/data"], "models/model.bin", "/data/models/model.bin"),
        (["./=/data"], "/models/model.bin", "/models/model.bin"),
        (["/mnt/a=/data=new"], "/mnt/a/x", "/data=new/x"),
        (["/mnt/größe=/データ"], "/mnt/größe/x y", "/データ/x y"),
        (["/mnt/a=relative"], "/mnt/a/x", "relative/x"),
        (["/mnt/a=/data"], "/mnt/a/../../etc/shadow", "/mnt/a/../../etc/shadow"),
        (["/mnt/a/..=/data"], "/mnt/a/../x", "/data/x"),
    ],
)
def test_a_path_is_remapped_once_by_its_longest_whole_component_prefix(
    remaps: list[str], captured: str, replay: str
) -> None:
    assert FileRemaps.parse(remaps).apply(captured) == replay


@pytest.mark.parametrize(
    ("remaps", "match"),
    [
        (["/mnt/a"], "expected CAPTURED=REPLAY, found no `=`"),
        ([""], "expected CAPTURED=REPLAY, found no `=`"),
        (["=/data"], "the captured prefix before `=` is empty"),
        (["="], "the captured prefix before `=` is empty"),
        (["/a=/b", "/a=/c"], "--replay-file-remap=/a=/b has the same captured prefix"),
        (["/a=/b", "/a/=/b"], "--replay-file-remap=/a=/b has the same captured prefix"),
        (["/a\0=/b"], "NUL"),
    ],
)
def test_wrong_remaps_are_refused_as_wrong_arguments(remaps: list[str], match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        FileRemaps.parse(remaps)
    assert (caught.value.status, caught.value.exit_code) == ("INVALID_ARGUMENT", 2)


def test_a_remap_that_matches_no_captured_file_is_refused() -> None:
    remaps = FileRemaps.parse(["/mnt/a=/data", "/mnt/b=/data"])
    remaps.check_used(["/mnt/a/1", "/mnt/b/2"])
    with pytest.raises(UsageError, match="--replay-file-remap=/mnt/b=/data matches no external file .* names /mnt/a/1"):
        remaps.check_used(["/mnt/a/1", "/mnt/bc/2"])
    with pytest.raises(UsageError, match="names none"):
        remaps.check_used([])
    FileRemaps.parse([]).check_used([])


def test_a_remap_that_longer_ones_always_beat_matches_nothing() -> None:
    with pytest.raises(UsageError, match="--replay-file-remap=/mnt=/x matches no external file"):
        FileRemaps.parse(["/mnt=/x", "/mnt/a=/y"]).check_used(["/mnt/a/1"])


def test_a_remap_that_leaves_nothing_of_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves nothing of the captured path"):
        FileRemaps.parse(["/mnt/a="]).apply("/mnt/a")


def test_two_captured_roots_go_to_two_places() -> None:
    remaps = FileRemaps.parse(["/weights=/disk1", "/data=/disk2/data"])
    assert [remaps.apply(path) for path in ("/weights/a", "/data/b")] == ["/disk1/a", "/disk2/data/b"]
    assert remaps and not FileRemaps.parse([])
