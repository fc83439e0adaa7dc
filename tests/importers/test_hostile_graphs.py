"""Execution traces and replay IR with anything in the place of anything: an import, or one clear error."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import OpReplayError
from replayfmt.format.reader import open_capture
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.importers.tracelens import import_tracelens

from .observed import ADD_, MM, RELU, Traced, Written
from .test_execution_trace_graph import collective
from .test_tracelens import entry, tensor

# fmt: off
WRONG: list[Any] = [
    None, True, -1, 0, 2**70, -(2**63), 1.5, float("nan"), "", "x", "<None>", [], {}, [[]], [1, 2, 3, 4, 5, "cpu"],
    [1, 2, -5, 4, 4, "cpu"], [10**12] * 3, "weird:device:1", "a\0b", "\ud800", "Tensor(float)", "x" * 5000,
    "GenericList[Tensor(float)]", MM, [0, 0, 0, 0, 0, ""], {"a": 1},
]
# fmt: on


def graph_trace(tmp_path: Path) -> Any:
    trace = collective(2)
    x = Traced(10, 20, [4, 4])
    trace.node("aten::mm", MM, [x, x], [Traced(11, 21, [4, 4])])
    trace.node("aten::add_", ADD_, [x, Traced(11, 21, [4, 4]), 1], [x], tensor_range='{"0":[0,1]}')
    trace.node("aten::relu", RELU, [x], [Traced(12, 21, [4, 4])])
    trace.node("triton_0", "", [x, 5], [], kernel_backend="triton", kernel_file="k.py")
    return json.loads(trace.save(tmp_path / "base.json").read_text())


def ir(_tmp_path: Path) -> Any:
    own = {"opreplay": {"overload": "default", "schema": MM}}
    return [
        entry("aten::mm", ("self", "Tensor", tensor([2, 3])), ("mat2", "Tensor", tensor([3, 4]))) | own,
        entry("aten::cat", ("tensors", "Tensor[]", [tensor([1, 2]), tensor([3, 2])]), dim=("int", 0)),
        entry("aten::_to_copy", ("self", "Tensor", tensor([4])), dtype=("ScalarType?", 15)),
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def changed(document: Any, chance: random.Random) -> str:
    document = copy.deepcopy(document)
    for path in chance.choices(list(places(document)), k=chance.randint(1, 5)):
        target = document
        try:
            for key in path[:-1]:
                target = target[key]
            if chance.random() < 0.15:
                del target[path[-1]]
            else:
                target[path[-1]] = chance.choice(WRONG)
        except (KeyError, IndexError, TypeError):
            pass  # something further up was changed before
    text = json.dumps(document)
    return text[: chance.randint(0, len(text))] if chance.random() < 0.2 else text


@pytest.mark.slow
@pytest.mark.parametrize(("make", "importer"), [(graph_trace, import_execution_trace), (ir, import_tracelens)])
def test_whatever_stands_in_a_trace_it_is_imported_or_refused(make: Any, importer: Any, tmp_path: Path) -> None:
    document = make(tmp_path)
    path, out = tmp_path / "hostile.json", tmp_path / "out.opreplay"
    imported = 0
    for seed in range(150):
        path.write_text(changed(document, random.Random(seed)), errors="surrogatepass")
        try:
            report = importer(path, out, force=True)
        except OpReplayError as error:
            assert str(path) in str(error)
            continue
        imported += 1
        json.dumps([*report.rows(), *report.lines()])
        with open_capture(out) as reader:
            assert sum(1 for _record in reader.records()) == reader.record_count
    assert imported > 75


def test_a_written_trace_is_not_hostile(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::relu", RELU, [Traced(10, 20, [4])], [Traced(11, 21, [4])])
    assert import_execution_trace(trace.save(tmp_path / "t.json"), tmp_path / "o.opreplay").calls()["exact"] == 1


@pytest.mark.slow
def test_nodes_of_nothing_take_little_memory(tmp_path: Path) -> None:
    count, trace = 20_000, Written()
    x = Traced(10, 20, [4, 4])
    trace.node("aten::mm", MM, [x, x], [Traced(11, 21, [4, 4])])
    text = json.loads(trace.save(tmp_path / "t.json").read_text())
    nothing = {"values": [], "shapes": [], "types": []}
    text["nodes"] += [
        {"id": number, "name": "", "ctrl_deps": 2, "inputs": nothing, "outputs": nothing, "attrs": []}
        for number in range(1000, 1000 + count)
    ]
    (tmp_path / "t.json").write_text(json.dumps(text))
    import_execution_trace(tmp_path / "t.json", tmp_path / "warm.opreplay")
    tracemalloc.start()
    try:
        report = import_execution_trace(tmp_path / "t.json", tmp_path / "out.opreplay")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.counts["nodes"] == count + 3 - 1 and report.counts["taken"] == 1
    assert most < 500 * count
