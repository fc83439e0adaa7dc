"""Which of PyTorch's own operators do something else than to compute on the tensors that they are given.

The dispatcher has operators that open files, print, talk to other processes, set up devices or make tensors without
looking at their memory. No program needs them replayed, so that one is in a capture is suspicious: nothing runs them
unless the user allows them by name. `tests/safety/test_host_operators.py` walks over all operators that PyTorch
registers and wants to know each namespace, and each operator of a kind that might do more than compute.
"""

from __future__ import annotations

# Namespaces whose operators compute on tensors, but those that are listed below.
COMPUTING = frozenset({
    "aten", "prims", "rngprims", "quantized", "_quantized", "quantization", "sparse", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "inductor", "inductor_prims", "_native", "_test",
})
COLLECTIVES = frozenset({
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem",
})
_NAMESPACES = {
    **dict.fromkeys(COLLECTIVES, "talks to other processes"),
    "debug_mode_ops": "is a part of PyTorch's debugging",
    "debugprims": "reads files",
    "export": "looks up attributes by name",
    "prim": "belongs to the TorchScript interpreter",
    "profiler": "is a part of the profiler",
    "static_runtime": "belongs to the TorchScript interpreter",
}
_UNCHECKED = "makes tensors without looking whether they fit into their memory"
_OPERATORS = {
    "aten::from_file": "opens files, or makes them",
    "aten::_print": "prints what the capture says",
    "aten::get_gradients": "is a part of distributed autograd",
    "aten::_cufft_clear_plan_cache": "changes the state of a device",
    "aten::_cufft_set_plan_cache_max_size": "changes the state of a device",
    "aten::_nested_view_from_buffer": _UNCHECKED,
    "aten::_nested_view_from_buffer_copy": _UNCHECKED,
    "inductor::_alloc_from_pool": _UNCHECKED,
    "inductor::_reinterpret_tensor": _UNCHECKED,
    "inductor::resize_storage_bytes_": "changes the length of memory under the tensors on it",
    "mkldnn::data_ptr": "gives a memory address",
}


def acts_outside(name: str) -> str | None:
    """What an operator of PyTorch's (`aten::from_file`) does beside computing: a verb with its object, None where it
    only computes. Of other libraries' operators nothing is known: the user imported them."""
    return _OPERATORS.get(name) or _NAMESPACES.get(name.partition("::")[0])


def refused_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Namespaces and names of all operators that `acts_outside` knows of, for scripts that stand alone."""
    return tuple(sorted(_NAMESPACES)), tuple(sorted(_OPERATORS))
