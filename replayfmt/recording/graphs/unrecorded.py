"""Work inside of a graph that no recorded op issued: launches of other libraries, callbacks of the host."""

from __future__ import annotations

from replayfmt.pytorch.graph_frontier import UnknownFrontier, frontier


class UnrecordedWork:
    """Looks for such work while one graph is captured: before each op the frontier of the capture must be what ops have
    led it to. `unknown`: why that cannot be told, if so."""

    def __init__(self, kind: str) -> None:
        """`kind` is that of the device."""
        self._kind = kind
        self._accounted: set[int] = set()
        self.unknown = ""

    def account(self) -> None:
        """What the graph holds now was issued by ops that are in its body."""
        if not self.unknown:
            try:
                self._accounted.update(node.handle for node in frontier(self._kind))
            except UnknownFrontier as problem:
                self.unknown = str(problem)

    def found(self) -> str:
        """What was issued since and is not accounted for, in words; "" if there is nothing."""
        if self.unknown:
            return ""
        try:
            kinds = [node.kind for node in frontier(self._kind) if node.handle not in self._accounted]
        except UnknownFrontier as problem:
            self.unknown = str(problem)
            return ""
        return ", ".join(sorted(set(kinds)))
