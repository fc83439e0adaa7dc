"""Ways to compile, and what becomes of each under a capture: its work is recorded, or one record says why not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import replayfmt

from .conftest import Capture

Program = Callable[[], Any]
pytestmark = pytest.mark.slow
RECORDED: dict[str, Callable[[], Program]] = {}
REFUSED: dict[str, tuple[Callable[[], Program], str]] = {}


def recorded(make: Callable[[], Program]) -> Callable[[], Program]:
    RECORDED[make.__name__] = make
    return make


def refused(reason: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    def decorate(make: Callable[[], Program]) -> Callable[[], Program]:
        REFUSED[make.__name__] = make, reason
        return make

    return decorate


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)).sin()


def on_small(model: nn.Module, **compile: Any) -> Program:
    compiled, x = torch.compile(model, **compile), torch.randn(4, 8)

    def infer() -> Any:
        with torch.no_grad():
            return compiled(x)

    return infer


@recorded
def flex_attention() -> Program:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bias = torch.randn(32)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i], block_mask=mask)

    compiled, given = torch.compile(attend), [torch.randn(1, 2, 32, 16) for _ in range(3)]
    return lambda: compiled(*given)


def frozen(**options: Any) -> Program:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model)

    def infer() -> Any:
        with torch.no_grad(), torch._inductor.config.patch(freezing=True, **options):
            return compiled(x)

    return infer


@recorded
def freezing_without_packed_weights() -> Program:
    return frozen(**{"cpp.weight_prepack": False})


@recorded
def compiled_autograd() -> Program:
    model, x = Small(), torch.randn(4, 8)
    compiled = torch.compile(model)

    def step() -> list[Tensor | None]:
        model.zero_grad()
        with torch._dynamo.compiled_autograd._enable(torch.compile):
            compiled(x).sum().backward()
        return [each.grad for each in model.parameters()]

    return step


@recorded
def backend_aot_eager() -> Program:
    model, x = Small(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="aot_eager")
    return lambda: compiled(x).sum().backward()


@recorded
def backend_eager() -> Program:
    return on_small(Small(), backend="eager")


@recorded
def backend_cudagraphs() -> Program:
    return on_small(Small(), backend="cudagraphs")


@recorded
def reduce_overhead() -> Program:
    return on_small(Small(), mode="reduce-overhead")


@recorded
def max_autotune() -> Program:
    return on_small(Small(), mode="max-autotune")


@recorded
def library_call_with_a_device() -> Program:
    compiled, x = torch.compile(lambda x: torch.randperm(8) + x.sin()), torch.randn(4, 8)

    def draw() -> Any:
        torch.manual_seed(0)
        return compiled(x)

    return draw


@recorded
def exported_and_run() -> Program:
    x = torch.randn(4, 8)
    module: Any = torch.export.export(Small(), (x,)).module()
    return lambda: module(x)


@recorded
def exported_and_compiled() -> Program:
    return on_small(torch.export.export(Small(), (torch.randn(4, 8),)).module())  # type: ignore[arg-type]


@recorded
def regional() -> Program:
    model, x = nn.Sequential(Small(), Small()), torch.randn(4, 8)
    for each in model:
        each.compile()
    return lambda: model(x)


@recorded
def nested_region() -> Program:
    inner: Any = torch.compiler.nested_compile_region(lambda x: x.sin() + 1)
    compiled, x = torch.compile(lambda x: inner(inner(x))), torch.randn(4, 8)
    return lambda: compiled(x)


@recorded
def nested_compile() -> Program:
    inner = torch.compile(lambda x: x.sin() + 1)
    compiled, x = torch.compile(lambda x: inner(x)), torch.randn(4, 8)
    return lambda: compiled(x)


@recorded
def disabled_inside() -> Program:
    plain: Any = torch.compiler.disable(lambda x: x.cos())
    compiled, x = torch.compile(lambda x: plain(x.sin() + 1).sin() + 1), torch.randn(4, 8)
    return lambda: compiled(x)


@recorded
def ahead_of_time_in_python() -> Program:
    """Its guards are looked through by Python."""
    x = torch.randn(4, 8)
    with torch._dynamo.config.patch(enable_aot_compile=True):  # as it is in later versions than 2.11
        compiled: Any = torch.compile(lambda x: x.sin() + 1, fullgraph=True)
        ahead = compiled.aot_compile(((x,), {}))
    return lambda: ahead(x)


@recorded
def loaded_from_caches() -> Program:
    """A graph and its forward and backward come from the caches of Inductor and AOTAutograd."""
    model, x = Small(), torch.randn(4, 8)
    torch.compile(model)(x).sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(model)
    compiled(x).sum().backward()
    counted = torch._dynamo.utils.counters["aot_autograd"]
    assert counted["autograd_cache_hit"] or torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    return lambda: compiled(x).sum().backward()


@recorded
def loaded_from_saved_artifacts() -> Program:
    model, x = Small().eval(), torch.randn(4, 8)
    torch.compile(model)(x)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    torch._dynamo.reset()
    torch.compiler.load_cache_artifacts(saved[0])
    compiled = torch.compile(model)
    compiled(x)
    return lambda: compiled(x)


@recorded
def optimizer_for_each() -> Program:
    model, x = Small(), torch.randn(4, 8)
    adam = torch.optim.Adam(model.parameters(), foreach=True)
    update = torch.compile(adam.step)

    def step() -> list[Tensor]:
        model(x).sum().backward()
        update()
        adam.zero_grad()
        return [each.detach() for each in model.parameters()]

    return step


@recorded
def asserts_on_values() -> Program:
    return on_small(Small(), options={"nan_asserts": True})


@recorded
def sizes_read_from_tensors() -> Program:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(lambda x, n: (x.nonzero().sin(), *torch.split(x.cos(), n.tolist())), fullgraph=True)
        x, sizes = torch.randn(8).relu(), torch.tensor([3, 5])
        compiled(x, sizes)
    return lambda: compiled(x, sizes)


@recorded
def named_for_the_profiler() -> Program:
    return on_small(Small(), options={"profiler_mark_wrapper_call": True})


@recorded
def printing() -> Program:
    def shown(x: Tensor) -> Tensor:
        torch._higher_order_ops.print("{} rows", x.shape[0])
        return x.sin() * 2

    compiled, x = torch.compile(shown), torch.randn(4, 8)
    return lambda: compiled(x)


@refused("beneath Python")
def cpp_wrapper() -> Program:
    return on_small(Small(), options={"cpp_wrapper": True})


@refused("without the dispatcher")
def static_runtime() -> Program:
    module = torch._C._jit_to_static_module(torch.jit.freeze(torch.jit.script(torch.nn.ReLU().eval()))._c)
    x = torch.ones(4)
    return lambda: module(x)


@pytest.mark.parametrize("name", RECORDED)
def test_it_is_recorded_and_replays(name: str, capture: Capture) -> None:
    run = RECORDED[name]()
    run()
    captured = capture(run)
    assert captured.unsupported() == [], name
    captured.replays()
    generated = [each for each in captured.written_calls() if each.startswith("cpp_")]
    called = [each for each in captured.kernels() if each.startswith("cpp_")]
    assert called == generated or (name == "nested_region" and len(called) == 2)  # in functions of their own


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_one_record_that_says_why(name: str, capture: Capture) -> None:
    make, reason = REFUSED[name]
    run = make()
    run()
    x = torch.ones(3)
    captured = capture(lambda: (x + 1, run(), x * 2))
    (record,) = captured.unsupported()
    assert record["reason"] == "compiled_region" and reason in str(record["detail"])
    assert captured.kernels() == ["add", "mul"], "nothing of it is recorded in part"


def symbols(x: Tensor) -> Tensor:
    return x.nonzero().sin()  # the compiler asserts of its length that it is none that it knows


def numpy(x: Tensor) -> Any:
    return np.cos(x.sin().numpy()) * 2  # made into an array by a function of PyTorch's that Dynamo looks into


def scope(x: Tensor) -> Tensor:
    with replayfmt.scope("inside"):
        return x.cos() * 2


@pytest.mark.parametrize(("function", "regions"), [(symbols, 1), (numpy, 1), (scope, 1)])
def test_what_is_compiled_within_a_capture_is_what_would_be_without(
    function: Callable[[Tensor], Tensor], regions: int, capture: Capture
) -> None:
    x = torch.eye(4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=function is scope)
        captured = capture(lambda: compiled(x))
    assert captured.unsupported() == []
    assert len(captured.regions) == regions
    captured.replays()


PACKAGE = """
import sys
import torch
import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
model = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
x = torch.ones(4, 8)
with replayfmt.capture(sys.argv[2]):
    result = (x * 2, model.run([x]), x + 1)
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
run = model.run
with replayfmt.capture(sys.argv[2] + "2"):
    used = run([x])[0] * 2
with open_capture(sys.argv[2] + "2") as reader:
    print(reader.summary.unsupported)
with open_capture(sys.argv[2]) as reader:
    records = list(reader.records())
    print([reader.kernels[each.signature.kernel].name for each in records if each.kind is RecordKind.op])
    for each in records:
        if each.kind is RecordKind.unsupported:
            print(*(node.constant for node in each.signature.args))
"""


def test_a_package_is_one_record_where_neither_dynamo_nor_inductor_was_imported(tmp_path: Path) -> None:
    exported = torch.export.export(Small().eval(), (torch.randn(4, 8),))
    package = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    done = subprocess.run(
        [sys.executable, "-c", PACKAGE, package, str(tmp_path / "c.opreplay")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kept, ops, record = done.stdout.splitlines()
    assert kept == "{'compiled_region': 1}", "a method that was taken before, whose call is not seen"
    assert ops == "['aten::mul', 'aten::add']"
    assert record.startswith("compiled_region AOTIModelPackageLoader") and "compiled ahead of time" in record
