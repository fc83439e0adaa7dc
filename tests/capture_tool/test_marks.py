"""`--mark`: calls of a program's callables become scopes."""

import asyncio
import contextlib
import functools
import importlib
import sys

import pytest

from replayfmt.errors import UsageError
from replayfmt.recording.program.marks import Marks, parse_mark
from replayfmt.recording.program.running import Program, compile_source

LIBRARY = '''
import functools

def function(x):
    """Documented."""
    return x + 1

def failing():
    raise ValueError("no")

async def waiting():
    return "waited"

def generator():
    yield 1

@functools.lru_cache
def cached():
    return "cached"

class Trainer:
    def step(self, x):
        return x * 2

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__

    class Inner:
        def deep(self):
            return "deep"

class Heir(Trainer):
    pass

class Model:
    def forward(self):
        return "forward"

    def __call__(self):
        return self.forward()

model = Model()
number = 3
'''


class Log:
    def __init__(self):
        self.events = []

    @contextlib.contextmanager
    def scope(self, name):
        self.events.append(f"+{name}")
        try:
            yield
        finally:
            self.events.append(f"-{name}")


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "marked_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: importlib.import_module("marked_library")
    sys.modules.pop("marked_library", None)


def marks_of(log, *texts, main_module=None):
    marks = Marks([parse_mark(text) for text in texts], log.scope, main_module)
    marks.install()
    return marks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "module",
        "module:f",
        "module=scope",
        ":f=scope",
        "module:=scope",
        "module:f=",
        "mod ule:f=s",
        "module:f:g=s",
        "1module:f=s",
        "module:f-g=s",
        "module:f=a=b",
        "module.:f=s",
        "module:f=a/b",
    ],
)
def test_a_malformed_mark_is_a_usage_error_that_shows_the_form(text):
    with pytest.raises(UsageError) as caught:
        parse_mark(text)
    assert f"--mark={text}" in str(caught.value)


def test_a_mark_reads_back_as_it_was_written():
    mark = parse_mark("a.b:C.d=step 1")
    assert (mark.module, mark.callable, mark.scope, str(mark)) == ("a.b", "C.d", "step 1", "a.b:C.d=step 1")


@pytest.mark.parametrize(
    ("target", "call", "result"),
    [
        ("function", lambda m: m.function(1), 2),
        ("cached", lambda m: m.cached(), "cached"),
        ("Trainer.step", lambda m: m.Trainer().step(4), 8),
        ("Trainer.step", lambda m: m.Heir().step(4), 8),
        ("Heir.step", lambda m: m.Heir().step(4), 8),
        ("Trainer.static", lambda m: m.Trainer.static(), "static"),
        ("Trainer.of_class", lambda m: m.Heir.of_class(), "Heir"),
        ("Trainer.Inner.deep", lambda m: m.Trainer.Inner().deep(), "deep"),
        ("Model.__call__", lambda m: m.model(), "forward"),
        ("model.forward", lambda m: m.model(), "forward"),
        ("waiting", lambda m: asyncio.run(m.waiting()), "waited"),
    ],
)
def test_each_call_of_a_marked_callable_is_a_scope(library, log, target, call, result):
    marks = marks_of(log, f"marked_library:{target}=part")
    assert marks.unmatched() == [f"--mark=marked_library:{target}=part: the program never imported marked_library"]
    module = library()
    assert call(module) == result
    assert call(module) == result
    assert log.events == ["+part", "-part"] * 2
    assert marks.unmatched() == marks.never_called() == []
    marks.remove()


def test_a_mark_on_a_base_class_does_not_touch_what_an_heir_has_marked(library, log):
    marks = marks_of(log, "marked_library:Heir.step=heir")
    module = library()
    module.Trainer().step(1)
    assert log.events == []
    marks.remove()


def test_a_marked_function_still_looks_like_itself_and_its_exceptions_pass(library, log):
    marks = marks_of(log, "marked_library:function=f", "marked_library:failing=g")
    module = library()
    assert (module.function.__name__, module.function.__doc__) == ("function", "Documented.")
    with pytest.raises(ValueError, match="no"):
        module.failing()
    assert log.events == ["+g", "-g"]
    marks.remove()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("gone", "marked_library has no gone"),
        ("Gone.step", "marked_library has no Gone"),
        ("Trainer.gone", "Trainer has no gone"),
        ("Trainer", "Trainer is a class; name one of its methods, such as Trainer.__call__"),
        ("number", "number is an object of class int, not a function or method"),
        (
            "model",
            "model is an object of class Model, not a function or method; name one of its methods, such as "
            "model.forward",
        ),
        (
            "generator",
            "generator is a generator function: its work runs between other work, so it cannot be a scope; mark "
            "what it calls",
        ),
    ],
)
def test_a_mark_that_finds_nothing_to_wrap_says_why(library, log, target, problem):
    marks = marks_of(log, f"marked_library:{target}=s")
    library()
    assert marks.unmatched() == [f"--mark=marked_library:{target}=s: {problem}"]
    marks.remove()


def test_a_mark_that_was_never_called_is_told(library, log):
    marks = marks_of(log, "marked_library:function=s")
    library()
    assert marks.never_called() == ["--mark=marked_library:function=s: was never called"]
    marks.remove()


SCRIPT = """
import functools, sys
if True:
    def step(x):
        return x + 1
try:
    class Trainer:
        def run(self):
            return step(1)
except ImportError:
    pass
@functools.lru_cache
def decorated():
    return sys._getframe(0).f_lineno
with open(__file__):
    async def unmarked(): pass
RESULT.append((step(1), Trainer().run(), decorated(), sorted(name for name in globals() if "mark" in name)))
step(1) if len(RESULT) > 1 else None
"""


def run_as_main(program, compiler, results, monkeypatch):
    """Run in this process, and put `__main__` back as it was."""
    import builtins

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "orig_argv", list(sys.orig_argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(builtins, "RESULT", results, raising=False)
    return program.run(compiler)


@pytest.mark.parametrize("as_module", [False, True])
def test_functions_of_the_main_module_can_be_marked(tmp_path, monkeypatch, log, as_module):
    (tmp_path / "main_program.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    program = Program("main_program" if as_module else "main_program.py", (), as_module)
    plain, marked = [], []
    assert run_as_main(program, compile_source, plain, monkeypatch) == 0
    step = "main_program:step=step" if as_module else "__main__:step=step"
    marks = marks_of(
        log,
        step,
        "__main__:Trainer.run=run",
        "__main__:decorated=cached",
        "__main__:gone=gone",
        main_module="main_program" if as_module else None,
    )
    assert run_as_main(program, marks.compiler(compile_source), marked, monkeypatch) == 0
    assert marked == plain, "the program sees the same values, lines and names"
    assert log.events == ["+step", "-step", "+run", "+step", "-step", "-run", "+cached", "-cached"]
    assert marks.unmatched() == ["--mark=__main__:gone=gone: the main module defines no function or class gone"]
    marks.remove()


def test_without_marks_on_the_main_module_its_source_is_compiled_as_ever(log):
    marks = marks_of(log, "json:dumps=d")
    assert marks.compiler(compile_source) is compile_source
    marks.remove()
    json = importlib.import_module("json")
    assert json.dumps(1) == "1"
    json.dumps = json.dumps.__wrapped__
    assert functools.reduce(lambda text, event: text + event, log.events) == "+d-d"
