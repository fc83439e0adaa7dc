"""The frontier of a graph that is being captured: the nodes that what a stream is given next comes after.

It says what the graph holds beneath PyTorch: work that a library launched on its own is a node, too. CUDA tells through
cuda-bindings, which PyTorch uses for the same (`torch.cuda._graph_annotations`); of another device its module is asked,
for `capture_frontier()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .accelerators import device_module

EMPTY = "empty"  # the kind of a node that does nothing but order others
_TOLD_BY_MODULES = "capture_frontier"


class GraphNode(NamedTuple):
    """A node: its handle, and its kind in words (`kernel`, `host`, `memcpy`, …)."""

    handle: int
    kind: str


class UnknownFrontier(Exception):
    """A device does not tell; the message says why."""


def frontier(kind: str) -> list[GraphNode]:
    """The nodes of a capture that the current streams of all devices of a kind have come to, nodes that do nothing left
    out in favour of what they come after. Raises UnknownFrontier."""
    if kind == "cuda":
        return list(_of_cuda())
    tell = getattr(device_module(kind), _TOLD_BY_MODULES, None)
    if tell is None:
        raise UnknownFrontier(f"PyTorch's module for {kind} has no {_TOLD_BY_MODULES}")
    try:
        return [GraphNode(int(handle), str(what)) for handle, what in tell()]
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnknownFrontier(f"{_TOLD_BY_MODULES} of PyTorch's module for {kind} failed: {error}") from None


def _of_cuda() -> Iterator[GraphNode]:
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError, RuntimeError) as error:
        raise UnknownFrontier(f"cuda-bindings cannot be imported: {error}") from None
    seen: set[int] = set()
    for index in range(torch.cuda.device_count()):
        stream = torch.cuda.current_stream(index).cuda_stream
        if not stream:
            continue  # a default stream cannot be captured
        told = _checked(runtime, "cudaStreamGetCaptureInfo", stream)
        if len(told) < 4:
            raise UnknownFrontier("cuda-bindings is older than version 13, whose functions are used")
        status, _number, _graph, nodes = told[:4]
        if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
            continue
        waiting = list(nodes or ())
        while waiting:
            node = waiting.pop()
            if int(node) in seen:
                continue
            seen.add(int(node))
            kind = _checked(runtime, "cudaGraphNodeGetType", node)[0].name.removeprefix("cudaGraphNodeType").lower()
            if kind != EMPTY:
                yield GraphNode(int(node), kind)
                continue
            count = _checked(runtime, "cudaGraphNodeGetDependencies", node)[-1]
            waiting += _checked(runtime, "cudaGraphNodeGetDependencies", node, count)[0] if count else ()


def _checked(runtime: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """What a function of the runtime tells, without its status."""
    try:
        status, *told = getattr(runtime, name)(*args)
    except (AttributeError, RuntimeError, TypeError) as error:  # RuntimeError: a driver without it
        raise UnknownFrontier(f"cuda-bindings has no {name} that can be used: {error}") from None
    if status != runtime.cudaError_t.cudaSuccess:
        raise UnknownFrontier(f"{name} failed: {status.name}")
    return tuple(told)
