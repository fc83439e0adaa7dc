"""Patches: applied when the module is there, restored exactly, and never missing without a word."""

import sys
import types

import pytest

from replayfmt.recording.patches import Patch, PatchSet


class Base:
    def inherited(self):
        return "inherited"


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("patched_library")

    class Derived(Base):
        def own(self):
            return "own"

        @staticmethod
        def static():
            return "static"

    class RunnerOne:
        def run(self):
            return 1

    class RunnerTwo:
        def run(self):
            return 2

    class RunnerThree(RunnerTwo):
        pass

    module.Derived, module.function = Derived, lambda: "function"
    module.RunnerOne, module.RunnerTwo, module.RunnerThree = RunnerOne, RunnerTwo, RunnerThree
    monkeypatch.setitem(sys.modules, "patched_library", module)
    return module


def louder(original):
    return lambda *args, **kwargs: f"{original(*args, **kwargs)}!"


def test_everything_is_restored_to_the_very_object_that_was_there(library):
    before = [dict(vars(library.Derived)), dict(vars(library)), dict(vars(Base))]
    patches = PatchSet(
        [
            Patch("patched_library", "Derived.own", louder),
            Patch("patched_library", "Derived.inherited", louder),
            Patch("patched_library", "Derived.static", lambda original: staticmethod(louder(original.__func__))),
            Patch("patched_library", "function", louder),
        ]
    )
    patches.install()
    instance = library.Derived()
    assert [instance.own(), instance.inherited(), instance.static(), library.function()] == [
        "own!",
        "inherited!",
        "static!",
        "function!",
    ]
    assert Base().inherited() == "inherited"
    patches.remove()
    patches.remove()
    assert [dict(vars(library.Derived)), dict(vars(library)), dict(vars(Base))] == before
    assert "inherited" not in vars(library.Derived)


def test_a_family_of_classes_is_patched_where_the_method_is_defined(library):
    patches = PatchSet([Patch("patched_library", "Runner*.run", louder)])
    patches.install()
    assert [library.RunnerOne().run(), library.RunnerTwo().run(), library.RunnerThree().run()] == ["1!", "2!", "2!"]
    patches.remove()
    assert [library.RunnerOne().run(), library.RunnerThree().run()] == [1, 2]


def test_a_target_that_does_not_exist_is_known(library):
    told = []
    patches = PatchSet(
        [
            Patch("patched_library", "Derived.gone", louder),
            Patch("patched_library", "Gone.run", louder),
            Patch("patched_library", "Gone*.run", louder),
            Patch("patched_library", "gone", louder),
            Patch("library_nobody_imports", "gone", louder),
        ],
        told.append,
    )
    patches.install()
    assert [patch.target for patch in patches.missing] == [
        f"patched_library.{name}" for name in ("Derived.gone", "Gone.run", "Gone*.run", "gone")
    ]
    assert told == patches.missing
    patches.remove()


def test_a_module_that_is_imported_later_is_patched_then(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("def function():\n    return 'late'\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches = PatchSet([Patch("late_library", "function", louder)])
    patches.install()
    assert "late_library" not in sys.modules
    import late_library

    assert late_library.function() == "late!"
    patches.remove()
    assert late_library.function() == "late"
    del sys.modules["late_library"]


def test_what_someone_else_wrapped_meanwhile_is_left_to_them(library):
    patches = PatchSet([Patch("patched_library", "function", louder)])
    patches.install()
    ours = library.function
    library.function = lambda: f"{ours()}?"
    patches.remove()
    assert library.function() == "function!?"
