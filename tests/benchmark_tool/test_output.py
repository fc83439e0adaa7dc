"""Result files are refused early and written whole."""

import os

import pytest

from replayfmt.benchmark.result_files import output_file
from replayfmt.errors import CaptureFailed, OpReplayError, OutputExists


def test_a_result_gets_its_name_only_once_it_is_whole(tmp_path):
    with output_file("--out", tmp_path / "a.json", force=False) as file:
        assert not (tmp_path / "a.json").exists()
        file.write("all of it")
    assert (tmp_path / "a.json").read_text() == "all of it" and os.listdir(tmp_path) == ["a.json"]


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(ZeroDivisionError), output_file("--out", tmp_path / "a.json", force=False):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_refused_without_force_and_kept_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OutputExists, match="--o: .*a.json: exists already; .*--force"), output_file("--o", path, False):
        pass
    with output_file("--out", path, force=True) as file:
        assert path.read_text() == "old"
        file.write("new")
    assert path.read_text() == "new"


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(OutputExists), output_file("--out", path, force=False) as file:
        path.write_text("someone else's")
        file.write("ours")
    assert path.read_text() == "someone else's"


@pytest.mark.parametrize(
    "name, words",
    [("missing/a.json", "--out: .*/a.json: there is no directory .*; create it first"), ("", "is a directory")],
)
def test_a_place_where_no_file_can_be_is_refused_as_by_every_tool(tmp_path, name, words):
    with pytest.raises(CaptureFailed, match=words), output_file("--out", tmp_path / name, force=True):
        pass


@pytest.mark.parametrize("path", ["", "missing/", "/"])
def test_a_name_without_a_file_name_is_refused(path):
    words = "--out: .*: is (empty|a directory); name a file to write to"
    with pytest.raises(CaptureFailed, match=words), output_file("--out", path, force=True):
        pass


def test_a_device_or_a_pipe_is_never_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", os.devnull):
        for force in (False, True):
            with pytest.raises(CaptureFailed, match="is a device or a pipe"), output_file("--out", path, force):
                pass
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_directory_that_takes_the_files_place_meanwhile_is_one_clear_error(tmp_path):
    with pytest.raises(CaptureFailed, match="is a directory"), output_file("--out", tmp_path / "a", force=True) as file:
        (tmp_path / "a").mkdir()
        file.write("x")
    words = "cannot be written: No such file"
    with pytest.raises(OpReplayError, match=words), output_file("--out", tmp_path / "b", force=True) as file:
        file.partial.unlink()
        file.commit()


def test_a_full_disk_is_one_clear_error(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with output_file("--out", tmp_path / "full", force=True) as file:
        file.partial.unlink()
        file.partial.symlink_to("/dev/full")
        with pytest.raises(OpReplayError, match="cannot be written: No space left"):
            file.write("x")
    assert os.listdir(tmp_path) == []


def test_the_file_has_the_permissions_that_any_new_file_has(tmp_path):
    with output_file("--out", tmp_path / "a", force=False) as file:
        file.write("")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
