"""Graphs of a device: what is issued while one is captured does not run, and runs at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .accelerators import default_generator, device_module, in_use, is_accelerator


class NoGraphs(Exception):
    """A device has no graphs; the message says so."""


def new_graph(device: torch.device) -> Any:
    """An empty graph of a device. Raises NoGraphs."""
    if not is_accelerator(device):
        raise NoGraphs(f"{device.type} has no graphs")
    if device.type == "cuda":
        return torch.cuda.CUDAGraph()
    if device.type == "xpu":
        return torch.xpu.XPUGraph()
    try:
        return torch.accelerator.Graph(capture_error_mode="thread_local")  # since PyTorch 2.12
    except (AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise NoGraphs(f"{device.type} has no graphs ({reason})") from None


def is_being_captured(kind: str) -> bool:
    """Whether the current stream of accelerators of a kind is being captured into a graph, as far as PyTorch's module
    for them tells. Where the program has not begun to use them, none is."""
    if not in_use(kind):
        return False
    stream = torch._C._accelerator_getStream(torch._C._accelerator_getDeviceIndex())
    if not stream.stream_id:  # no default stream can be
        return False
    tells = getattr(device_module(kind), "is_current_stream_capturing", None)
    return tells is not None and bool(tells())


def captured(device: torch.device, issue: Callable[[], None]) -> Any:
    """A graph of what `issue` gives to the current stream of a device. Raises what `issue` and the device raise, and
    leaves streams and devices as they were.

    Other threads may use the device meanwhile: only what this one does can spoil the graph.
    """
    graph = new_graph(device)
    before, index = torch.accelerator.current_stream(device), torch.accelerator.current_device_index()
    try:
        if device.type == "cuda":
            # A stream of its own: torch.cuda.graph keeps one for all captures, on the device of the first.
            stream = torch.cuda.Stream(device)
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                issue()
        elif device.type == "xpu":
            with torch.xpu.device(device), torch.xpu.graph(graph):
                issue()
        else:
            torch.accelerator.set_device_index(device.index or 0)
            with torch.Stream(device), graph:
                issue()
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)
    return graph


def without_draws(device: torch.device, run: Callable[[], None]) -> None:
    """Run something after which the device's generator is in the state that it was in."""
    generator = default_generator(device)
    state = None if generator is None else generator.get_state()
    try:
        run()
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)
