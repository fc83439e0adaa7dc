"""Values of any kind for every parameter of the library's functions: an error of the library's own that says something,
or the work is done; nothing is written half, and no descriptor of the process is touched."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.benchmark import convenience
from replayfmt.errors import CaptureFailed, OpReplayError, UsageError
from replayfmt.format.validation import count_of, flag_of, path_of, paths_of, texts_of
from replayfmt.recording.options import CaptureOptions
from replayfmt.replay.convenience import PlanOptions

VALUES: tuple[Any, ...] = (
    None,
    -1,
    10**30,
    10**5000,
    float("nan"),
    "",
    "\udcff",
    "a\0b",
    b"\xff",
    [None],
    ["\udcff"],
    {"a": 1},
    object(),
    torch.ones(2),
    "fifo",
    "folder",
    "/dev/full",
    ["step.opreplay=fifo"],
)
pytestmark = pytest.mark.usefixtures("folder", "ends_in_time")


def made(path: Any = "out.opreplay", **options: Any) -> None:
    with replayfmt.capture(path, **({"force": True} | options)):
        torch.ones(3) + 1


def started(*arguments: Any) -> None:
    recorder = replayfmt.Recorder(*arguments)
    recorder.start()
    try:
        torch.ones(3) + 1
    finally:
        recorder.close()


def in_scope(name: Any) -> None:
    with replayfmt.capture("out.opreplay", force=True), replayfmt.scope(name):
        torch.ones(3) + 1


def of_op(take: Callable[[Any], Any]) -> None:
    with replayfmt.open("step.opreplay") as capture:
        take(capture.ops[0])


def executed(**options: Any) -> None:
    with replayfmt.Plan("step.opreplay") as plan:
        plan.execute(**options)


def requested(**options: Any) -> None:
    replayfmt.request_capture(**({"path": "out.opreplay"} | options)).close()


def parameters(function: Any) -> list[str]:
    every = inspect.signature(function).parameters.values()
    return [each.name for each in every if each.kind is not each.VAR_KEYWORD and each.name != "self"]


def calls() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Each parameter of each function, with a call that gives it a value."""

    def each(name: str, function: Callable[..., Any], names: Any, /, **given: Any) -> Iterator[tuple[str, Any]]:
        for one in names:
            yield f"{name} {one}", lambda value, one=one: function(**(given | {one: value}))

    options = [field.name for field in dataclasses.fields(CaptureOptions)]
    yield from each("capture", made, ["path", *options, "no_such_option"])
    yield "Recorder path", lambda value: started(value)
    yield "Recorder options", lambda value: started("out.opreplay", value)
    yield "scope", in_scope
    yield "open", lambda value: replayfmt.open(value).close()
    replayed = ["path", "verify", "keep_going", "check", *PlanOptions.__annotations__]
    yield from each("run", replayfmt.run, replayed, path="step.opreplay")
    plans = [name for name in parameters(replayfmt.Plan.__init__) if name not in PlanOptions.__annotations__]
    yield from each("Plan", lambda **given: replayfmt.Plan(**given).close(), plans, capture="step.opreplay")
    yield from each("execute", executed, parameters(replayfmt.Plan.execute))
    for name in ("device", "file_remaps", "initializers"):
        yield f"replay {name}", lambda value, name=name: of_op(lambda op: op.replay(**{name: value}))
    for name in ("file_remaps", "replay", "substitutions"):
        yield f"inputs {name}", lambda value, name=name: of_op(lambda op: op.inputs(**{name: value}))
    measured = {"path": "step.opreplay", "min_time": "1x", "warmup": 0}
    yield from each("benchmark", replayfmt.benchmark, parameters(convenience.benchmark), **measured)
    source = {"path": "trace.json", "out": "{rank}.opreplay"}
    yield from each("import_trace", replayfmt.import_trace, parameters(replayfmt.import_trace), **source)
    yield from each("import_ranks", replayfmt.import_ranks, parameters(replayfmt.import_ranks), **source)
    yield from each("request_capture", requested, [*parameters(replayfmt.request_capture), "payload", "no_such_option"])
    substitution = {"selector": "aten::mul", "function": torch.mul}
    yield from each(
        "Substitution",
        lambda **given: replayfmt.run("step.opreplay", substitutions=[replayfmt.Substitution(**given)]),
        substitution,
        **substitution,
    )
    yield "register_op_alias", lambda value: replayfmt.register_op_alias("a", value)
    yield "register_op_library", lambda value: replayfmt.register_op_library(value, "b")
    yield "register_string_default", lambda value: replayfmt.register_string_default(value, "c", "d")


CALLS = dict(calls())


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_parameter_of_any_kind_ends_in_an_error_of_the_library_or_in_what_was_asked(name: str, folder: Path) -> None:
    before, refused = set(os.listdir(folder)), 0
    for value in VALUES:
        try:
            CALLS[name](value)
        except OpReplayError as error:
            assert str(error) and "\n  File " not in str(error)
            refused += 1
        for descriptor in range(3):
            os.fstat(descriptor)
        new = set(os.listdir(folder)) - before
        assert not [each for each in new if "partial" in each], value
        for each in new:
            os.unlink(folder / each)
        assert before <= set(os.listdir(folder)), value
    assert refused > len(VALUES) // 3


def test_a_number_is_no_file() -> None:
    """It would be an open file's number, which is read and closed."""
    reading, writing = os.pipe()
    for call in (replayfmt.open, replayfmt.run, lambda value: replayfmt.import_trace(value, "x.opreplay"), made):
        with pytest.raises(UsageError, match="a path"):
            call(reading)  # type: ignore[operator]
    os.close(reading)
    os.close(writing)


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(UsageError, match="capture: there is no option 'paylod'"):
        made(paylod="full")
    with pytest.raises(UsageError, match="request_capture: there is no option 'paylod'"):
        requested(paylod="full")


def test_what_arguments_are_taken_for() -> None:
    assert path_of("p", b"a\xff") == "a\udcff" and paths_of("p", Path("x")) == ("x",)
    assert texts_of("t", "one") == ("one",) and texts_of("t", iter(["a", "b"])) == ("a", "b")
    assert flag_of("f", 1) is True and flag_of("f", False) is False and count_of("c", 3, 0, 3) == 3
    with pytest.raises(UsageError, match="f='no': expected True or False"):
        flag_of("f", "no")
    with pytest.raises(UsageError, match=r"c=True: expected a whole number from 0 to 3"):
        count_of("c", True, 0, 3)
    with pytest.raises(UsageError, match="t=a dict: expected a list of texts"):
        texts_of("t", {"a": 1})
    with pytest.raises(UsageError, match="p=a number of thousands of digits: expected a path"):
        path_of("p", 10**5000)


def test_what_was_closed_says_so() -> None:
    capture = replayfmt.open("step.opreplay")
    capture.close()
    capture.close()
    for look in (lambda: capture.summary, lambda: list(capture.ops.by_ordinal), lambda: repr(capture)):
        with pytest.raises(UsageError, match="this capture was closed; open it again"):
            if look():  # an empty answer would be one
                pytest.fail("a closed capture answered")
    recorder = replayfmt.Recorder("closed.opreplay")
    recorder.close()
    with pytest.raises(CaptureFailed, match="make a new one"):
        recorder.start()
    requests = replayfmt.request_capture("closed.opreplay")
    requests.close()
    requests.close()
    with pytest.raises(CaptureFailed, match="call request_capture again"):
        requests.start()


def test_a_capture_never_takes_the_place_of_a_file_that_it_refers_to(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(64))
    with pytest.raises(UsageError, match="would take the place of a file that it refers to"):
        made("folder/../weights.bin", files="weights.bin")
    assert (folder / "weights.bin").read_bytes() == bytes(64)
    (folder / "weights.bin").unlink()


def test_ops_are_found_by_ordinals_alone() -> None:
    with replayfmt.open("step.opreplay") as capture:
        first = next(iter(capture.ops.by_ordinal))
        assert first in capture.ops.by_ordinal and capture.ops.by_ordinal[torch.tensor(first)].ordinal == first  # type: ignore[call-overload]
        for value in (None, "0", 0.0, -1, 10**30, b"", [], object()):
            assert value not in capture.ops.by_ordinal
