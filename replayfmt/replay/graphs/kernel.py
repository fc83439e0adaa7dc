"""The kernel of a graph: a call of it is one replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch

from replayfmt.format.graphs import storage_of_argument
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.device_graphs import NoGraphs, captured, new_graph, without_draws
from replayfmt.pytorch.settings import apply_settings, preserved_settings

from ..planning.effects import Effects, effects_of_schema
from ..planning.kernels import StoredCodeKernel
from .steps import BodySteps, Storages

GraphsMode = Literal["captured", "issued"]
GRAPHS_MODES = ("captured", "issued")
_MOST_CAPTURES = 8  # of one graph: memory that moves from call to call is not worth a capture each time


class ReplayedGraph(StoredCodeKernel):
    """A graph that is ready to be replayed. Captured once for each set of addresses, because a graph has its memory's
    addresses in it; issued op by op where that is asked for, or cannot be done."""

    def __init__(
        self,
        schema: torch.FunctionSchema,
        steps: BodySteps,
        devices: frozenset[torch.device],
        mode: GraphsMode,
        *,
        draws: bool,
        unsure: frozenset[int],
        settings: Mapping[str, Any],
        streams: str,
        unchecked: str,
    ) -> None:
        """`devices` do its work. `unsure`: storages that ops of its body may write without saying so. `settings` are
        the numeric ones that it was captured under. `streams` says on how many it runs, if it was captured on several.
        `unchecked`: why nobody looked for work that is not in its body."""
        self.draws = draws
        self._schema = schema
        self._steps = steps
        self._unsure = unsure
        self._settings = settings
        self._streams = streams
        self._unchecked = unchecked
        self._names = [argument.name for argument in schema.arguments]
        self._written = {argument.name for argument in schema.arguments if argument.alias_info is not None}
        self._unsure_names = {
            name for name in self._names if storage_of_argument(name) in unsure and name not in self._written
        }
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._kept_for_graphs: list[torch.UntypedStorage] = []  # memory of the host that they use
        self._warm = False
        self._device = next(iter(devices)) if len(devices) == 1 else None
        self._why_issued = "--graphs=issued" if mode == "issued" else self._why_not()

    def loaded(self) -> ReplayedGraph | str:
        problem = self._steps.load()
        return f"{self._schema.name} is a graph that cannot be replayed: {problem}" if problem else self

    def _why_not(self) -> str:
        """Why it cannot be captured here; "" if it can."""
        if self._device is None:
            return "its work is on several devices"
        try:
            new_graph(self._device)
        except NoGraphs as problem:
            return str(problem)
        return ""

    @property
    def is_issued(self) -> bool:
        """Whether its ops are issued one by one at each replay."""
        return bool(self._why_issued)

    @property
    def how(self) -> str:  # type: ignore[override]
        """How it is replayed, and what is different from the program's graph."""
        streams = f", {self._streams}" if self._streams else ""
        beside = f"; not checked for work that no operator issued: {self._unchecked}" if self._unchecked else ""
        if self._why_issued:
            return f"issued op by op ({self._why_issued}){streams}{beside}"
        return f"captured into a graph of {self._device}{streams}{beside}"

    @property
    def schema(self) -> torch.FunctionSchema:
        return self._schema

    @property
    def call(self) -> Callable[..., Any]:
        return self._replay

    def effects(self, layout: SlotLayout) -> Effects:
        found = effects_of_schema(layout, self._schema, False, complete=True)
        unsure = tuple(slot for each in layout.args if each.node.name in self._unsure_names for slot in each.tensors)
        return Effects(found.writes, found.rebinds, found.reshapes, unsure)

    def runs_on(self, device_type: str) -> bool:
        return True  # its ops were asked

    # --------------------------------------------------------------------------------------------------------- a call

    def _replay(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        storages = {storage_of_argument(name): tensor.untyped_storage() for name, tensor in given.items()}
        if not self._why_issued:
            graph = self._graph(given, storages)
            if graph is not None:
                graph.replay()
                return
        self._issue(storages)

    def _issue(self, storages: Storages) -> list[torch.UntypedStorage]:
        with ExitStack() as stack:
            if self._settings:
                before = stack.enter_context(preserved_settings())
                apply_settings(self._settings, before)
            return self._steps.issue(storages)

    def _graph(self, given: Mapping[str, torch.Tensor], storages: Storages) -> Any:
        """The graph for memory at these addresses; None if there is none and will be none."""
        key = tuple(storage.data_ptr() for storage in storages.values())
        known = self._graphs.get(key)
        if known is not None or len(self._graphs) >= _MOST_CAPTURES:
            return known
        device = self._device
        assert device is not None
        used: list[torch.UntypedStorage] = []  # by the device, maybe later: kept as long as the graph
        try:
            if not self._warm:  # libraries make themselves ready at their first call, which no capture permits
                without_draws(device, lambda: used.extend(self._issue(self._copies(given, storages))))
                self._warm = True
            known = self._graphs[key] = captured(device, lambda: used.extend(self._issue(storages)))
            self._kept_for_graphs += used
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self._why_issued = f"{device.type} could not capture it: {reason}"
        return known

    def _copies(self, given: Mapping[str, torch.Tensor], storages: Storages) -> Storages:
        """The same memory, with copies of what is written."""
        written = {storage_of_argument(name) for name in given if name in self._written} | self._unsure
        return {number: storage.clone() if number in written else storage for number, storage in storages.items()}
