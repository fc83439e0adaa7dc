"""Sees work that reaches devices without passing through the dispatcher, and records it as unsupported.

Compiled regions (Inductor graphs, ahead-of-time compiled models, TorchScript fusion groups) run kernels that a dispatch
mode never sees, and so do kernels that PyTorch compiles from CUDA source and launches; a replay without them would be
silently wrong. Each is replaced by a function that writes an `unsupported` record, runs the original with recording
paused on this thread, and marks whatever the work may have written to be imported again at its next use. Inside an op
(a custom operator that launches Triton, say) and inside another hooked region nothing is recorded: the replay calls the
outer op as a whole.

The table at the end is the list of what is hooked. Nothing is imported just to be hooked (see patches.py).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, cast

import torch

from replayfmt.pytorch.tensors.memory import layout_of, storage_of

from .frames import leave_no_frames, outwards
from .inductor import Regions, running_regions
from .patches import HookHost, Patch, Patched, PatchSet, Watch, around, report_missing, targets

Function = Callable[..., Any]

# Nodes of an executed TorchScript graph that run kernels of their own instead of calling operators.
_HIDING_NODES = (
    "prim::TensorExprGroup",
    "prim::TensorExprDynamicGroup",
    "prim::CudaFusionGroup",
    "prim::FusionGroup",
    "prim::oneDNNFusionGroup",
    "prim::mkldnn_convolution",
    "prim::BroadcastMKLDNNTensors",
    "prim::MKLDNNLayerNorm",
    "prim::MKLDNNHardSwish",
    "prim::MKLDNNHardSigmoid",
    "prim::MKLDNNHardTanh",
    "prim::MKLDNNClamp",
)


_NOBODY = cast(HookHost, None)  # for when the table is only read


class Hooks(Patched):
    def __init__(self, recorder: HookHost, compiled: str = "keep") -> None:
        """`compiled`: `keep` lets compiled regions run as they are, `kernels` records what they call, `eager` has
        torch.compile run their operators."""
        self._recorder = recorder
        self._compiled = compiled
        self._regions = Regions(recorder) if compiled == "kernels" else None
        self._patches = PatchSet(table(recorder, self._regions), self._report_missing)
        self._dynamo: Watch | None = None
        self._stance: Any = None

    def install(self) -> None:
        if self._compiled == "eager":
            self._dynamo = Watch("torch._dynamo", functools.partial(self._recorder.attempt, self._force_eager))
        self._report_kept_methods()
        self._patches.install()
        self._join_running_regions()

    def _join_running_regions(self) -> None:
        """Regions that a thread is in the middle of now: the rest of what they call is recorded, too, or this is
        reported."""
        for region in running_regions():
            unknown = None if self._regions is None else self._recorder.attempt(self._regions.open, region)
            if unknown != "":
                name, detail = _graph_name(region, ())
                first = f"{_RUNS_ALREADY}; {unknown}" if unknown else _RUNS_ALREADY
                self._recorder.unsupported_throughout("compiled_region", name, f"{first}; {detail}")

    def _report_kept_methods(self) -> None:
        """Report methods of packages that the program has taken from them before: a call of such a method reaches the
        C++ function that it was then, which nothing stands in for."""
        methods = [vars(cls)[name] for name in _RUNNING for cls in targets(torch._C._aoti, f"AOTIModel*.{name}")[0]]
        functions = list(filter(None, (getattr(method, "__func__", None) for method in methods)))
        # Most programs have none, and a look through all objects takes longer than the rest of a capture's start.
        (counted,) = map(sys.getrefcount, [object()])  # of what a list alone holds
        if all(count <= counted + 1 for count in map(sys.getrefcount, functions)):
            return  # the class alone holds them
        kept = [each for each in gc.get_referrers(*functions) if isinstance(each, MethodType)]
        for region in {id(each.__self__): each.__self__ for each in kept}.values():
            name = type(region).__qualname__
            self._recorder.unsupported_throughout("compiled_region", name, f"{_KEPT}; {_PACKAGE}")

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
        if self._regions is not None:
            self._regions.close()
        if self._dynamo is not None:
            self._dynamo.stop()
            self._dynamo = None
        if self._stance is not None:
            self._stance.__exit__(None, None, None)  # restores the previous stance
            self._stance = None

    def _force_eager(self, dynamo: Any) -> None:
        if self._stance is None:
            self._stance = dynamo.set_stance("force_eager")

    def _report_missing(self, patch: Patch) -> None:
        if patch.vital:
            report_missing(self._recorder, patch)
        warnings.warn(f"opreplay: {patch.missing}", RuntimeWarning, stacklevel=2)


def hook_policies() -> dict[str, str]:
    """What the session records about the hooks: the targets that this build lacks, among the modules imported now."""
    rows = [row for row in table(_NOBODY) if row.module in sys.modules]
    absent = [row.target for row in rows if not targets(sys.modules[row.module], row.attribute)[0]]
    return {"hooks_missing": ", ".join(absent)} if absent else {}


# ---------------------------------------------------------------------------------------------------- compiled regions


_AOT_COMPILE = os.path.join("torch", "_dynamo", "aot_compile.py")
_Given = list[tuple[int | None, "weakref.ref[torch.Tensor]"]]


def _region(
    recorder: HookHost,
    describe: Callable[[Any, tuple[Any, ...]], tuple[str, str]],
    original: Function,
    regions: Regions | None = None,
    hint: str = "",
    reason: str = "compiled_region",
) -> Function:
    """A compiled region, or a launch: its kernels are fused or call the C library directly, so none of its work may be
    recorded, unless `regions` knows all that it calls. Calls after the first are noted without Python where that is
    possible."""
    noted: dict[int, tuple[weakref.ref[Any], Function]] = {}  # by the region's identity

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if regions is not None and recorder.attempt(regions.opened, self):
                return seen(self, *args, **kwargs)
            known = noted.get(id(self))
            if known is not None and known[0]() is self and not kwargs:
                results = known[1](original, self, args)
                if results is not NotImplemented:
                    return results
            return complete(self, *args, **kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "mutated_input_idxs", ()):
            recorder.tell(_write_given, _written_arguments(self, args, kwargs))
        return original(self, *args, **kwargs)

    def complete(self: Any, *args: Any, **kwargs: Any) -> Any:
        unknown = None if regions is None else recorder.attempt(regions.open, self)
        if unknown == "":
            return seen(self, *args, **kwargs)
        if not recorder.launching():
            return original(self, *args, **kwargs)
        # Before the call, and without keeping a reference to an argument: a region frees its arguments while it runs.
        # What is marked is read at its next recorded use, which comes after the region.
        given = recorder.attempt(enter, self, args, kwargs, unknown)
        with recorder.paused():
            results = original(self, *args, **kwargs)
        recorder.attempt(leave, given, results)
        return results

    def enter(region: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unknown: str | None) -> _Given:
        name, detail = describe(region, args)
        first = unknown or hint
        signature = recorder.unsupported(reason, name, f"{first}; {detail}" if first else detail)
        if signature is not None and regions is None:
            note(region, signature, args)
        mark_written(recorder, _written_arguments(region, args, kwargs))
        return [(_storage(tensor), weakref.ref(tensor)) for tensor in tensors_of((args, kwargs))]

    def note(region: Any, signature: int, args: tuple[Any, ...]) -> None:
        if type(region).__weakrefoffset__:
            calling = recorder.session.noted_region(
                signature, _written_indices(region, args), functools.partial(mark_written, recorder)
            )
            if calling is None:
                return
            number = id(region)
            noted[number] = weakref.ref(region, lambda _: noted.pop(number, None)), calling

    def leave(given: _Given | None, results: Any) -> None:
        # A result may reuse the memory of an earlier result, or of an argument that has no other reference. What the
        # region passes through (a forward region returns what its backward needs) is unchanged.
        kept = {storage for storage, tensor in given or () if tensor() is not None}
        mark_written(recorder, [tensor for tensor in tensors_of(results) if _storage(tensor) not in kept])

    return call


def _compiling(recorder: HookHost, original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Inductor compiles: what it computes for that (patterns to look for, trials of kernels) is no work of the
    program's."""
    with recorder.paused():
        return original(*args, **kwargs)


def _write_given(session: Any, tensors: Any) -> None:
    """A region is about to write memory that it was given. Its kernels keep what they do not write of that, also where
    another region allocated it."""
    for tensor in tensors_of(tensors):
        if layout_of(tensor) is torch.strided:
            session.storages.no_longer_generated(storage_of(tensor))


def _storage(tensor: torch.Tensor) -> int | None:
    """A key shared by tensors on the same memory, while one of them lives. None: no memory of its own."""
    return storage_of(tensor)._cdata if layout_of(tensor) is torch.strided else None


def mark_written(recorder: HookHost, value: Any) -> bool:
    """Mark every tensor in a value. Returns whether nothing more need be said of their memory until it is used."""
    return all([recorder.mark_outside_write(tensor) for tensor in tensors_of(value)])


def _written_indices(region: Any, args: tuple[Any, ...]) -> list[int] | None:
    """The arguments that a region may write, by index in its list of arguments. None: any of them."""
    indices = getattr(region, "mutated_input_idxs", None)
    return None if indices is None or len(args) != 1 or not isinstance(args[0], (list, tuple)) else list(indices)


def _written_arguments(region: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that a region may write: those that Inductor names, else all."""
    indices = _written_indices(region, args)
    return (args, kwargs) if indices is None else [args[0][i] for i in indices if i < len(args[0])]


def _graph_name(graph: Any, _args: tuple[Any, ...]) -> tuple[str, str]:
    kernel = getattr(graph, "fx_kwargs", None) or {}
    name = getattr(graph, "compile_region_name", None) or f"graph {kernel.get('graph_id')}"
    devices = ", ".join(sorted(getattr(graph, "device_types", ())))
    if kernel.get("is_backward"):
        direction, advice = "backward", _OF_BACKWARD
    else:
        direction, advice = "forward", _AHEAD_OF_TIME if _is_ahead_of_time() else _EAGER
    return f"torch.compile {name} ({direction})", (
        f"Inductor runs fused kernels that no dispatch mode sees; devices: {devices or 'not known'}; {advice}"
    )


_PACKAGE = (
    "a model that was compiled ahead of time runs beneath Python, kernels and library calls alike; capture the module "
    "or the exported program that it was compiled from"
)
_STATIC = (
    "the static runtime calls most kernels without the dispatcher; capture the TorchScript module it was made from"
)
_OF_INFERENCE = "; capture the module that was given to torch.jit.optimize_for_inference"
_LAUNCH = (
    "PyTorch launches this kernel without an operator; launch it inside of one (torch.library.custom_op), and the call "
    "of that operator is recorded"
)
_KERNELS = "--compiled=kernels, the default, records what its code calls"
_KEPT = (
    "the program holds a method of this package that it took before the capture began, so calls of it cannot be seen: "
    "call the package itself"
)
_RUNS_ALREADY = (
    "a thread is in the middle of it as the capture begins, so only a part of what it does from then on is seen: begin "
    "the capture where no thread runs compiled code"
)
_OUTSIDE = "outside_operator"
_RUNNING = ("run", "boxed_run")  # methods of packages that run them
# How to capture the operators of a region. When a backward pass runs, it is unknown what called its forward.
_EAGER = "capture with --compiled=eager to record its operators"
_AHEAD_OF_TIME = (
    "it was compiled ahead of time (aot_compile), which --compiled=eager does not undo: let the program "
    "call the function that was compiled"
)
_OF_BACKWARD = (
    "to record its operators, capture it with its forward and --compiled=eager; if that was compiled ahead "
    "of time (aot_compile), let the program call the function that was compiled instead"
)


def _is_ahead_of_time() -> bool:
    """Whether the running region, a forward pass, was called by the program itself, bypassing Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo._stance.stance == "force_eager":
        return True  # or it would not run
    return any(frame.f_code.co_filename.endswith(_AOT_COMPILE) for frame in outwards(sys._getframe()))


def _jiterator_name(kernel: Any, _args: tuple[Any, ...]) -> tuple[str, str]:
    return f"torch.cuda.jiterator {kernel.kernel_name}", _LAUNCH


def _cuda_kernel_name(_kernel: Any, _args: tuple[Any, ...]) -> tuple[str, str]:
    return "torch.cuda kernel compiled from source", _LAUNCH


def _class_name(region: Any, _args: tuple[Any, ...]) -> tuple[str, str]:
    return type(region).__qualname__, _PACKAGE


def _static_name(region: Any, _args: tuple[Any, ...]) -> tuple[str, str]:
    return type(region).__qualname__, _STATIC


def _script(recorder: HookHost, original: Function, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A TorchScript call: its operators are recorded as they are issued; fused groups hide theirs."""
    results = original(function, *args, **kwargs)
    recorder.attempt(_tell_hidden, recorder, function, (args, kwargs, results))
    return results


def _tell_hidden(recorder: HookHost, function: Any, values: Any) -> None:
    graph: Any = torch._C._last_executed_optimized_graph()  # by this thread
    hidden = [] if graph is None else [kind for kind in _HIDING_NODES if graph.findAllNodes(kind)]
    if hidden and recorder.launching():
        advice = _OF_INFERENCE if any("mkldnn" in kind.lower() for kind in hidden) else ""
        recorder.unsupported(
            "compiled_region",
            f"torch.jit {getattr(function, 'name', type(function).__name__)}",
            f"TorchScript ran {', '.join(hidden)}, which call no operators{advice}",
        )
        mark_written(recorder, values)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in arguments or results: also inside lists, tuples, dicts and Triton's tensor descriptors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


# ---------------------------------------------------------------------------------------------------------- the table


def table(recorder: HookHost, regions: Regions | None = None) -> list[Patch]:
    """Every hook, for one recorder. `regions`: what records the insides of Inductor's regions, if anything does."""

    def hook(call: Function) -> Callable[[Function], Function]:
        return around(functools.partial(call, recorder))

    def region(describe: Function, **more: Any) -> Callable[[Function], Function]:
        return lambda original: _region(recorder, describe, original, **more)

    def launch(describe: Function) -> Callable[[Function], Function]:
        return lambda original: _region(recorder, describe, original, reason=_OUTSIDE)

    inductor = "torch._inductor.output_code"
    return [
        Patch(
            inductor,
            "CompiledFxGraph.__call__",
            region(_graph_name, regions=regions, hint=_KERNELS),
            "compiled_region",
            vital=True,
        ),
        # The second compiles backward passes, later.
        *(
            Patch("torch._inductor.compile_fx", name, hook(_compiling))
            for name in ("compile_fx", "compile_fx_inner", "compile_fx_aot")
        ),
        Patch(inductor, "CompiledAOTI.__call__", region(_class_name), "compiled_region"),
        *(
            Patch("torch._C._aoti", f"AOTIModel*.{name}", region(_class_name), "compiled_region", vital=name == "run")
            for name in _RUNNING
        ),
        *(
            Patch("torch._C", f"StaticModule.{name}", region(_static_name), "compiled_region")
            for name in ("__call__", "runAsync", "benchmark", "benchmark_individual_ops")
        ),
        Patch("torch.cuda.jiterator", "_JittedFunction.__call__", launch(_jiterator_name), _OUTSIDE),
        Patch("torch.cuda._utils", "_CudaKernel.__call__", launch(_cuda_kernel_name), _OUTSIDE),
        Patch("torch._C", "ScriptFunction.__call__", hook(_script), "compiled_region", vital=True),
        Patch("torch._C", "ScriptMethod.__call__", hook(_script), "compiled_region", vital=True),
    ]
