"""Work inside of a graph that no recorded op issued: launches of other libraries, callbacks of the host."""

from __future__ import annotations

from replayfmt.pytorch.graph_frontier import UnknownFrontier, frontier


class UnrecordedWork:
    """Looks for such work while one graph is captured: before each op the frontier of the capture must be what ops have
    led it to. Who looks and sees nothing knows nothing: an op that has work must have led the frontier on."""

    def __init__(self, kind: str) -> None:
        """`kind` is that of the device."""
        self._kind = kind
        self._accounted: set[int] = set()
        self._failed = ""
        self._unseen = ""

    @property
    def unknown(self) -> str:
        """Why it cannot be told, if so."""
        return self._failed or self._unseen

    def account(self, op: str = "") -> None:
        """What the graph holds now was issued by ops that are in its body. `op`: the last of them, if it has work."""
        if self._failed:
            return
        try:
            nodes = {node.handle for node in frontier(self._kind)}
        except UnknownFrontier as problem:
            self._failed = str(problem)
            return
        if op and nodes <= self._accounted:
            self._unseen = self._unseen or f"the device told of no work of {op}, which has some"
        self._accounted |= nodes

    def found(self) -> str:
        """What was issued since and is not accounted for, in words; "" if there is nothing."""
        if self._failed:
            return ""
        try:
            kinds = [node.kind for node in frontier(self._kind) if node.handle not in self._accounted]
        except UnknownFrontier as problem:
            self._failed = str(problem)
            return ""
        return ", ".join(sorted(set(kinds)))
