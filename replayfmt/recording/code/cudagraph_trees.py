"""CUDA graphs that Inductor makes of its regions (`mode="reduce-overhead"`) are switched off while code is recorded.

In such a region, or in each of its partitions, a function stands in place of the generated one: it runs the generated
function once while a graph is captured, and replays that graph from then on. For the capture the generated function is
put back in its place, and afterwards the one that replays graphs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from replayfmt.format.printable import tell

_MODULE = "torch._inductor.compile_fx"
_GRAPHED = "cudagraphify.<locals>.run"
_BACKWARD = "maybe_handle_backward_generation.<locals>.compiled_artifact"  # tells the trees that a backward pass runs
_NOTE = (
    "CUDA graphs of compiled regions are switched off while they are recorded: their kernels are launched one by one, "
    "and take longer"
)


def graph_policies(compiled: str) -> dict[str, str]:
    """What the session says of it."""
    torch = sys.modules["torch"]
    return {"cudagraph-trees": "off"} if compiled == "kernels" and torch.backends.cuda.is_built() else {}


class GraphsSwitchedOff:
    """What one capture has put in the place of functions that replay graphs."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def switch_off(self, region: Any) -> None:
        """Have a region run its generated functions."""
        called, runner = getattr(region, "current_callable", None), getattr(region, "compiled_fn_runner", None)
        plain = without_graph(called)
        partitions = getattr(runner, "partitions", None) or []
        graphed = [index for index, each in enumerate(partitions) if without_graph(each) is not each]
        if plain is called and not graphed:
            return
        if not self._replaced:
            tell(f"opreplay: {_NOTE}")
        for index in graphed:
            self._put(weakref.ref(runner), index, partitions[index], without_graph(partitions[index]))
            partitions[index] = without_graph(partitions[index])
        if plain is not called:
            region.current_callable = plain
            # A graph copies its inputs to where their memory is aligned; the generated code wants them to be.
            output_code: Any = sys.modules["torch._inductor.output_code"]
            output_code.maybe_realign_inputs(False, region, region.inputs_to_check, region.mutated_input_idxs)
            self._put(weakref.ref(region), None, called, region.current_callable)

    def put_back(self) -> None:
        """What others have replaced since then is left alone."""
        while self._replaced:
            found, index, original, replacement = self._replaced.pop()
            holder = found()
            if holder is None:
                continue
            if index is None:
                if holder.current_callable is replacement:
                    holder.current_callable = original
            elif len(holder.partitions) > index and holder.partitions[index] is replacement:
                holder.partitions[index] = original

    def _put(self, holder: Callable[[], Any], index: int | None, original: Any, replacement: Any) -> None:
        self._replaced.append((holder, index, original, replacement))


def without_graph(function: Any) -> Any:
    """The function that runs while a graph is captured of it; the function itself if it replays none."""
    for module, name, variable in (
        ("torch._inductor.output_code", _BACKWARD, "compiled_graph_callable"),
        (_MODULE, _GRAPHED, "model"),
    ):
        if getattr(function, "__qualname__", "") == name and function.__module__ == module:
            function = function.__closure__[function.__code__.co_freevars.index(variable)].cell_contents
    return function
