"""Operators written in Python are one op each, unless they hide state: then what happens inside is recorded."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.recording.options import CaptureOptions

from .conftest import Capture, Captured

_layers: dict[str, Any] = {}
_namespaces = (f"opreplay_launching_{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    _layers.update(first=torch.zeros(2, 3), second=torch.zeros(2, 3), weight=torch.randn(3, 3))
    yield
    _layers.clear()


@torch.library.custom_op("opreplay_hidden::attend", mutates_args=())
def attend(query: torch.Tensor, layer: str) -> torch.Tensor:
    """As the attention of serving engines is: the cache is found by the layer's name."""
    noise = torch.rand(3) * torch.tensor([1.0, 2.0, 3.0])
    scaled = query * 2 + noise
    _layers[layer].copy_(scaled)
    return torch.nn.functional.linear(_layers[layer], scaled) + 1


_library = torch.library.Library("opreplay_hidden", "FRAGMENT")
_library.define("absent(Tensor x) -> Tensor")
_library.impl("absent", lambda x: x * 2, "SparseCPU")
_library.define("project(Tensor x, str name) -> Tensor")
_library.impl("project", lambda x, name: x @ _layers[name], "CompositeExplicitAutograd")
_library.define("scale(Tensor x, str mode, Tensor(a!) out) -> Tensor")


def _scale(x: torch.Tensor, mode: str, out: torch.Tensor) -> torch.Tensor:
    """All that an operator may do without hiding state."""
    import numpy as np

    with torch.profiler.record_function("inside"):
        factor = torch.tensor(float(len(mode))) + torch.rand(()) + halved(x).sum()
        table = torch.from_numpy(np.sqrt(x.numpy()))
        hidden = torch.nn.functional.linear(x, x).relu_()
        out.copy_(torch.nn.functional.dropout(hidden, 0.5) * factor)
    return table + torch.zeros(3)


_library.impl("scale", _scale, "CPU")


@torch.library.custom_op("opreplay_hidden::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.library.custom_op("opreplay_hidden::outer", mutates_args=())
def outer(x: torch.Tensor) -> torch.Tensor:
    return attend(halved(x) + 1, "first").sum() + halved(x)


def own_ops(captured: Captured) -> list[str]:
    return [op for op in captured.ops() if not op.startswith("aten::")]


@pytest.mark.parametrize("digests", ["live", "ops"])
@pytest.mark.parametrize("inference", [False, True])
def test_an_operator_that_finds_memory_by_a_name_is_recorded_as_what_happens_inside(
    capture: Capture, inference: bool, digests: str
) -> None:
    def program() -> Any:
        with torch.inference_mode(inference):
            torch.manual_seed(3)
            query = torch.arange(6.0).view(2, 3)
            return [attend(query + step, layer) for step in range(3) for layer in ("first", "second")]

    expected = program()
    captured = capture(program, digests=digests)
    assert all(map(torch.equal, captured.returned, expected))
    assert own_ops(captured) == [] and captured.unsupported() == {}
    assert captured.ops().count("aten::copy_.default") == captured.ops().count("aten::rand.default") == 6
    captured.replays()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_gradients_flow_through_the_inside(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(2, 3, requires_grad=True)
        (torch.ops.opreplay_hidden.project(x, "weight") ** 2).sum().backward()
        return x.grad

    expected = program()
    captured = capture(program, digests="ops")
    assert torch.equal(captured.returned, expected) and own_ops(captured) == []
    captured.replays()


def test_an_operator_that_hides_nothing_is_one_op_from_its_first_call_on(capture: Capture) -> None:
    def program() -> Any:
        torch.manual_seed(1)
        x, out = torch.rand(3, 3), torch.empty(3, 3)
        return [(torch.ops.opreplay_hidden.scale(x, "ab", out), out.clone()) for _ in range(3)]

    expected = program()
    captured = capture(program, digests="ops")
    assert all(
        torch.equal(a, b)
        for one, two in zip(captured.returned, expected, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert captured.ops() == [
        "aten::rand.default",
        "aten::empty.memory_format",
        *["opreplay_hidden::scale.default", "aten::clone.default"] * 3,
    ]
    assert captured.unsupported() == {} and not captured.records(RecordKind.host_read)
    captured.replays()


def test_an_operator_around_one_that_hides_state_does_so_too(capture: Capture) -> None:
    captured = capture(lambda: [outer(torch.ones(2, 3)) for _ in range(3)], digests="ops")
    # Of the first call, `halved` is told once it is known that the call is recorded as what is inside.
    assert own_ops(captured) == ["opreplay_hidden::halved.default"] * 6
    captured.replays()


def _undeclared(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _returned(x: torch.Tensor) -> torch.Tensor:
    return _layers["first"]


def _generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=_layers["generator"])


def _settings(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch.set_default_dtype(torch.float64)
    try:
        return y + torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


def _moved(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.resize_(2).fill_(1)
    return y + 1


for _name, _function in (
    ("undeclared", _undeclared),
    ("returned", _returned),
    ("generator", _generator),
    ("settings", _settings),
    ("moved", _moved),
):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _function, "CPU")


@pytest.mark.parametrize("name", ["undeclared", "returned", "generator", "settings", "moved"])
def test_what_else_a_replay_of_the_call_could_not_know(capture: Capture, name: str) -> None:
    def program() -> Any:
        _layers["generator"] = torch.Generator().manual_seed(5)
        first = _layers["first"] + 1
        return first, [getattr(torch.ops.opreplay_hidden, name)(torch.ones(3)) for _ in range(3)]

    captured = capture(program, digests="ops")
    assert own_ops(captured) == [] and captured.unsupported() == {}
    captured.replays()


def _remembering(x: torch.Tensor) -> torch.Tensor:
    if "made" not in _layers:
        _layers["made"] = torch.ones(3)
    return x + _layers["made"].add_(1)


_library.define("absent_on_meta(Tensor x) -> Tensor")
_library.impl("absent_on_meta", lambda x: x * 2, "Meta")
_library.define("remembering(Tensor x) -> Tensor")
_library.impl("remembering", _remembering, "CPU")


def test_memory_that_an_operator_makes_and_keeps_is_named(capture: Capture) -> None:
    def program() -> Any:
        return [torch.ops.opreplay_hidden.remembering(torch.ones(3)) for _ in range(3)]

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {"hidden_state": 1}
    assert own_ops(captured) == ["opreplay_hidden::remembering.default"]
    (record,) = captured.records(RecordKind.unsupported)
    assert "--inside" in record.argument("detail")
    del _layers["made"]
    gc.collect()
    captured = capture(program, digests="ops", inside=["opreplay_hidden::remem*"])
    assert captured.unsupported() == {} and own_ops(captured) == []
    captured.replays()


def test_the_user_may_decide(capture: Capture) -> None:
    x = torch.ones(2, 3)
    inside = capture(lambda: halved(x), inside="opreplay_hidden::halved")
    assert inside.ops() == ["aten::div.Tensor"]
    assert inside.reader.session.policies["inside"] == "opreplay_hidden::halved"
    whole = capture(lambda: attend(x, "first"), whole=["opreplay_hidden::*"])
    assert whole.ops() == ["opreplay_hidden::attend.default"]


def test_an_operator_without_a_kernel_for_its_arguments_stays_one(capture: Capture) -> None:
    """PyTorch says that there is none; what happens inside cannot be recorded."""

    def program() -> Any:
        torch.ops.opreplay_hidden.absent(torch.ones(2).to_sparse())
        with pytest.raises(NotImplementedError, match="absent"):
            torch.ops.opreplay_hidden.absent(torch.ones(2))

    assert own_ops(capture(program, inside="opreplay_hidden::absent")) == ["opreplay_hidden::absent.default"] * 2


def test_kernels_for_the_meta_device_are_recorded_inside_too(capture: Capture) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    captured = capture(lambda: torch.ops.opreplay_hidden.absent_on_meta(x.detach().to("meta")), inside="*::absent_on_*")
    assert own_ops(captured) == []


@pytest.mark.parametrize(
    "options", [{"inside": "attend"}, {"whole": ["aten::mm"]}, {"inside": "a::b", "whole": "a::b"}], ids=str
)
def test_only_operators_of_other_packages_can_be_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CaptureOptions(**options)


def test_a_launch_before_the_state_was_seen_is_named(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.output_code import CompiledFxGraph

    monkeypatch.setattr(CompiledFxGraph, "__call__", lambda _graph, args: [args[0] * 2])
    graph = object.__new__(CompiledFxGraph)

    def launching(x: torch.Tensor) -> torch.Tensor:
        doubled = graph([x])[0]
        return doubled + _layers["first"] if _layers["hide"] else doubled + 1

    namespace = next(_namespaces)  # of its own: PyTorch 2.11 forgets a library late, and by name
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define("run(Tensor x) -> Tensor")
        library.impl("run", launching, "CPU")
        run = getattr(torch.ops, namespace).run
        _layers["hide"] = False
        captured = capture(lambda: run(torch.ones(3)))
        assert captured.unsupported() == {} and own_ops(captured) == [f"{namespace}::run.default"]
        _layers["hide"] = True
        assert capture(lambda: run(torch.ones(3))).unsupported() == {"unseen_work": 1}
