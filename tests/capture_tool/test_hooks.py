"""Work that passes the dispatcher by is recorded as unsupported, and runs as it would."""

import functools
import importlib
import re
import sys
from types import MethodType

import pytest
import torch

import replayfmt
from replayfmt.format.reader import open_capture
from replayfmt.recording import undispatched as hooks_module
from replayfmt.recording.code.graph_replays import Graphs
from replayfmt.recording.patches import Patch
from replayfmt.recording.undispatched import Hooks

from .fakes import FakeRecorder


@pytest.fixture
def recorder():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recorder = FakeRecorder()
    hooks = Hooks(recorder)
    hooks.install()
    assert hooks.missing == []
    with recorder.mode:
        yield recorder
    hooks.remove()
    torch.set_num_threads(threads)


def unsupported(recorder):
    return [event[1:3] for event in recorder.take("unsupported")]


# ---------------------------------------------------------------------------------------------------- compiled regions


@pytest.fixture(scope="module")
def compiled():
    """One small compiled function for all tests, with its eager form."""

    def function(x, w, counter):
        counter.add_(1)
        return torch.relu(x @ w).sin().sum()

    yield function, torch.compile(function)
    torch._dynamo.reset()


def compiled_ahead(function, x):
    compiled = torch.compile(function, fullgraph=True)
    if not hasattr(compiled, "aot_compile"):
        pytest.skip("this PyTorch compiles functions ahead of time only if its config says so")
    return compiled.aot_compile(((x,), {}))


@pytest.mark.slow
def test_eager_is_not_advised_for_what_was_compiled_ahead_of_time(recorder):
    def function(x):
        return x.sin() * 2

    x = torch.randn(4)
    with recorder.paused():
        ahead = compiled_ahead(function, x)
    recorder.log.clear()
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            ahead(x)
        [event] = recorder.take("unsupported")
        assert event[1] == "compiled_region" and "let the program call the function that was compiled" in event[3]
        assert "capture with" not in event[3]
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_backward_pass_is_not_told_that_eager_helps_where_its_forward_was_compiled_ahead(recorder, compiled):
    def function(x):
        return (x.sin() * x).sum()

    x = torch.randn(4, requires_grad=True)
    with recorder.paused():
        ahead = compiled_ahead(function, x)
    recorder.log.clear()
    ahead(x).backward()
    compiled[1](torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.zeros(3)).backward()
    forward, backward, plain, other = recorder.take("unsupported")
    assert "(forward)" in forward[2] and "capture with --compiled=eager" not in forward[3]
    assert "(forward)" in plain[2] and plain[3].endswith("capture with --compiled=eager to record its operators")
    for event in (backward, other):
        assert "(backward)" in event[2] and "capture it with its forward and --compiled=eager; if that was" in event[3]
        assert event[3].endswith("let the program call the function that was compiled instead")


@pytest.mark.slow
def test_forward_and_backward_of_a_compiled_function_are_one_record_each(recorder, compiled):
    eager, function = compiled
    x, w, counter = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.zeros(3)
    with recorder.paused():
        expected = eager(x, w, counter)
        expected.backward()
        gradient, w.grad = w.grad, None
    recorder.log.clear()
    result = function(x, w, counter)
    forward = recorder.take()
    result.backward()
    backward = recorder.take()
    addresses = {
        name: tensor.data_ptr() for name, tensor in (("x", x), ("w", w), ("counter", counter), ("result", result))
    }
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(w.grad, gradient)
    assert counter.tolist() == [2.0] * 3
    for events, way in ((forward, "forward"), (backward, "backward")):
        ((reason, op),) = [event[1:3] for event in events if event[0] == "unsupported"]
        assert reason == "compiled_region" and re.fullmatch(rf"torch\.compile graph \d+ \({way}\)", op)
    assert ("op", "aten.mm.out") not in forward + backward, "the region's own kernels"
    marked = {event[1] for event in forward if event[0] == "mark"}
    assert {addresses["counter"], addresses["result"]} <= marked, "what the region writes"
    assert not marked & {addresses["x"], addresses["w"]}, "what it only reads"


@pytest.mark.slow
def test_a_recompiled_function_is_seen_too(recorder, compiled):
    _, function = compiled
    function(torch.randn(5, 8), torch.randn(8, 8), torch.zeros(4, dtype=torch.float64))
    assert [reason for reason, _ in unsupported(recorder)] == ["compiled_region"]


@pytest.mark.slow
def test_compiling_host_reads_and_running_without_the_hooks_works_as_before(compiled):
    eager, function = compiled
    arguments = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(3)
    torch.testing.assert_close(function(*arguments), eager(*arguments))
    assert not hasattr(torch._inductor.output_code.CompiledFxGraph.__call__, "__wrapped__")


@pytest.mark.slow
def test_with_compiled_eager_the_operators_run_and_the_stance_is_put_back(compiled):
    _, function = compiled
    recorder = FakeRecorder()
    hooks = Hooks(recorder, compiled="eager")
    hooks.install()
    with recorder.mode:
        function(torch.randn(4, 8), torch.randn(8, 8), torch.zeros(3))
        torch.compile(lambda x: x.cos(), fullgraph=True)(torch.ones(3))
    hooks.remove()
    ops = [event[1] for event in recorder.take("op", "unsupported")]
    assert {"aten.mm.default", "aten.relu.default", "aten.sin.default", "aten.cos.default"} <= set(ops)
    assert "compiled_region" not in ops
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with (again := FakeRecorder()).mode:
        (hooks := Hooks(again)).install()
        function(torch.randn(4, 8), torch.randn(8, 8), torch.zeros(3))
        hooks.remove()
    assert [reason for reason, _ in unsupported(again)] == ["compiled_region"]


@pytest.mark.slow
def test_a_region_inside_an_op_is_part_of_the_op(recorder, compiled):
    _, function = compiled

    @torch.library.custom_op("capture_tests::compiled_inside", mutates_args=())
    def compiled_inside(x: torch.Tensor) -> torch.Tensor:
        return function(x, torch.ones(8, 8), torch.zeros(3)).clone()

    compiled_inside(torch.ones(4, 8))
    assert unsupported(recorder) == []


def test_arguments_of_a_region_are_freed_while_it_runs(recorder):
    """The boxed calling convention: a region takes its arguments out of the list that it is given."""
    import weakref

    import torch._inductor.debug  # PyTorch 2.11 takes it for granted
    from torch._inductor.output_code import CompiledFxGraph

    graph = CompiledFxGraph.__new__(CompiledFxGraph)
    graph._compile_context, graph.mutated_input_idxs, graph.device_types = None, [0], ("cpu",)
    graph.fx_kwargs, graph.compile_region_name = {"graph_id": 7, "is_backward": True}, None
    freed = []

    def run(inputs):
        alive = weakref.ref(inputs[0].untyped_storage())
        inputs.clear()
        freed.append(alive() is None)
        return []

    graph.current_callable = run
    graph.compiled_fn_runner = None
    graph([torch.ones(3)])
    assert freed == [True]
    assert unsupported(recorder) == [("compiled_region", "torch.compile graph 7 (backward)")]


def test_a_model_compiled_ahead_of_time_is_a_region(recorder):
    class AOTIModelRunnerOfATest:
        def run(self, inputs):
            return [inputs[0].mul_(2)]

    runners = sys.modules["torch._C._aoti"]
    assert {"AOTIModelContainerRunnerCpu", "AOTIModelPackageLoader"} <= set(vars(runners))
    assert all(
        hasattr(getattr(runners, name).run, "__wrapped__")
        for name in ("AOTIModelContainerRunnerCpu", "AOTIModelPackageLoader")
    )
    run = hooks_module._region(recorder, hooks_module._class_name, AOTIModelRunnerOfATest.run)
    tensor = torch.ones(2)
    recorder.log.clear()
    run(AOTIModelRunnerOfATest(), [tensor])
    assert [event[0] for event in recorder.log] == ["unsupported", "mark"]


def test_cuda_kernels_that_pytorch_launches_without_an_operator_are_unsupported(recorder, monkeypatch):
    """Stand-ins launch; tests/recording/test_launches_gpu.py has the real ones."""
    import torch.cuda.jiterator
    from torch.cuda._utils import _CudaKernel

    x, made = torch.ones(2), torch.ones(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launches = "_cuda_jiterator_compile_and_launch_kernel"
    monkeypatch.setattr(torch._C, launches, lambda *_arguments: made.mul_(2), raising=False)
    monkeypatch.setattr(torch.cuda._utils, "_get_gpu_runtime_library", lambda: 1 / 0, raising=False)
    monkeypatch.setattr(torch.cuda._utils, "_get_cuda_library", lambda: 1 / 0)
    recorder.log.clear()
    squared = torch.cuda.jiterator._create_jit_fn("template <typename T> T squared(T x) { return x * x; }")
    assert squared(x) is made
    assert [event[0] for event in recorder.log] == ["unsupported", "mark", "mark"]
    assert unsupported(recorder) == [("outside_operator", "torch.cuda.jiterator squared")]
    recorder.log.clear()
    with pytest.raises(ZeroDivisionError):
        _CudaKernel(None, None)((1, 1, 1), (32, 1, 1), [x])
    assert unsupported(recorder) == [("outside_operator", "torch.cuda kernel compiled from source")]


def test_torchscript_is_recorded_op_by_op_and_its_fused_groups_as_unsupported(recorder):
    @torch.jit.script
    def plain(x):
        return (x + 1).sin()

    x = torch.randn(3)
    recorder.log.clear()
    for _ in range(3):
        plain(x)
    assert [event[1] for event in recorder.take("op", "unsupported")] == ["aten.add.Scalar", "aten.sin.default"] * 3
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).eval()
    with recorder.paused():
        fused = torch.jit.optimize_for_inference(torch.jit.script(convolution))
    recorder.log.clear()
    fused(torch.ones(1, 3, 5, 5))
    events = recorder.take()
    assert [event[1] for event in events if event[0] == "unsupported"] == ["compiled_region"]
    assert "prim::mkldnn_convolution" in [event[3] for event in events if event[0] == "unsupported"][0]


# ------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(("module", "name"), [("torch.xpu.graphs", "XPUGraph"), ("torch._C", "_acceleratorGraph")])
def test_a_replay_of_a_graph_that_was_captured_before_is_recorded_as_such(recorder, monkeypatch, module, name):
    class StandIn:
        def capture_begin(self): ...

        def capture_end(self): ...

        def reset(self): ...

        def raw_cuda_graph(self): ...

        def raw_cuda_graph_exec(self): ...

        def replay(self):
            torch.ones(3)
            return "replayed"

    StandIn.__name__ = name
    monkeypatch.setattr(importlib.import_module(module), name, StandIn, raising=False)  # 2.11 has CUDA's alone
    graphs = Graphs(recorder)
    graphs.install()
    assert graphs.missing == []
    assert StandIn().replay() == "replayed"
    ((_, reason, op, detail),) = recorder.take("op", "unsupported")
    assert (reason, op) == ("cuda_graph", f"{name}.replay") and "before the recording began" in detail
    torch.ones(3)
    assert [event[0] for event in recorder.take()] == ["op"]
    graphs.remove()
    assert not hasattr(StandIn.replay, "__wrapped__")


# ------------------------------------------------------------------------------------------------------- what is there


def test_a_vital_target_that_this_build_lacks_makes_the_capture_say_so(recorder, monkeypatch):
    rows = [
        Patch("torch", "Gone.run", lambda original: original, "triton_launch", vital=True),
        Patch("torch", "GoneToo.run", lambda original: original, "triton_launch"),
    ]
    monkeypatch.setattr(hooks_module, "table", lambda recorder, regions=None: rows)
    hooks = Hooks(recorder)
    with pytest.warns(RuntimeWarning, match="this build has no torch.Gone"):
        hooks.install()
    hooks.remove()
    assert hooks.missing == ["torch.Gone.run", "torch.GoneToo.run"]
    assert unsupported(recorder) == [("triton_launch", "torch.Gone.run")]


def test_objects_are_searched_for_methods_of_packages_only_where_something_holds_one(monkeypatch):
    searched = []
    monkeypatch.setattr(hooks_module.gc, "get_referrers", lambda *functions: searched.append(functions) or [])
    monkeypatch.setattr(hooks_module, "table", lambda recorder, regions=None: [])
    loader = torch._C._aoti.AOTIModelPackageLoader
    for is_held in (False, True, False):
        held = [MethodType(vars(loader)["run"].__func__, loader)] if is_held else []
        hooks = Hooks(FakeRecorder())
        hooks.install()
        hooks.remove()
        assert bool(searched) is is_held, held
        searched.clear()
        held.clear()


@pytest.mark.parametrize("options", [{}, {"native": "off"}, {"start_op": 1}], ids=str)
def test_what_is_never_seen_is_in_every_capture_once(tmp_path, monkeypatch, options):
    rows = [Patch("torch", "Gone.run", lambda original: original, "triton_launch", vital=True)]
    monkeypatch.setattr(hooks_module, "table", lambda recorder, regions=None: rows)
    x = torch.ones(3)
    with (
        pytest.warns(RuntimeWarning, match="this build has no torch.Gone"),
        replayfmt.capture(tmp_path / "c.opreplay", **options),
    ):
        x + 1
        x + 2
    with open_capture(tmp_path / "c.opreplay") as reader:
        assert reader.summary.unsupported == {"triton_launch": 1}


def test_the_session_says_which_targets_this_build_lacks(monkeypatch):
    assert hooks_module.hook_policies() == {}
    rows = [
        Patch("torch", "Gone.run", lambda original: original),
        Patch("torch", "add", lambda original: original),
        Patch("never_imported", "Gone.run", lambda original: original),
    ]
    monkeypatch.setattr(hooks_module, "table", lambda recorder, regions=None: rows)
    assert hooks_module.hook_policies() == {"hooks_missing": "torch.Gone.run"}


def test_every_hook_is_there_once_and_is_taken_out_again():
    import torch._inductor.output_code
    import torch._inductor.runtime.triton_heuristics  # noqa: F401

    def targets():
        found = {}
        for row in hooks_module.table(FakeRecorder()):
            if "*" not in row.attribute and row.module in sys.modules:
                owner, _, name = row.attribute.rpartition(".")
                holder = functools.reduce(getattr, filter(None, owner.split(".")), sys.modules[row.module])
                found[row.target] = vars(holder)[name]
        return found

    before = targets()
    assert len(before) >= 4
    hooks = Hooks(FakeRecorder())
    hooks.install()
    assert all(now is not before[target] for target, now in targets().items())
    hooks.remove()
    assert all(now is before[target] for target, now in targets().items())
