"""Waiting for imports: the module is what it would be, and nothing stays behind."""

import importlib
import importlib.resources
import inspect
import sys

import pytest

from replayfmt.recording import patches
from replayfmt.recording.patches import Watch


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "watched_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("import sys\nLOADER_WHILE_RUNNING = type(__loader__).__name__\n")
    (folder / "part.py").write_text("def function():\n    return 1\n")
    (folder / "text.txt").write_text("resource")
    (folder / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "watched_package"
    for name in [name for name in sys.modules if name.partition(".")[0] == "watched_package"]:
        del sys.modules[name]


def test_a_watch_is_told_after_the_module_has_run_and_only_of_its_module(package):
    seen = []
    watch = Watch(f"{package}.part", lambda module: seen.append((module.__name__, module.function())))
    importlib.import_module(package)
    assert seen == []
    importlib.import_module(f"{package}.part")
    assert seen == [("watched_package.part", 1)]
    watch.stop()


def test_a_module_that_is_imported_already_is_reported_at_once():
    seen = []
    Watch("json", seen.append).stop()
    assert seen == [importlib.import_module("json")]


def test_a_module_that_is_executed_again_is_reported_again(package):
    seen = []
    watch = Watch(package, seen.append)
    module = importlib.import_module(package)
    importlib.reload(module)
    watch.stop()
    importlib.reload(module)
    assert seen == [module, module]


def test_a_watched_module_keeps_its_own_loader(package):
    watch = Watch(package, lambda module: None)
    module = importlib.import_module(package)
    watch.stop()
    assert module.LOADER_WHILE_RUNNING == "SourceFileLoader"
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert "LOADER_WHILE_RUNNING" in inspect.getsource(module)
    assert importlib.resources.files(module).joinpath("text.txt").read_text() == "resource"


def test_a_module_that_fails_to_import_is_not_reported_and_fails_as_before(package):
    seen = []
    watch = Watch(f"{package}.broken", seen.append)
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(f"{package}.broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.missing")
    watch.stop()
    assert seen == []


def test_the_finder_is_gone_when_nothing_is_watched(package):
    watches = [Watch(package, lambda module: None), Watch(f"{package}.part", lambda module: None)]
    assert patches._finder in sys.meta_path
    for watch in watches:
        watch.stop()
        watch.stop()
    assert patches._finder not in sys.meta_path
