"""Finding the operator a captured kernel names, in the torch that is here.

Only the dispatcher is asked: a name in a file never causes an import of anything that the file chose. A schema that
changed since the capture is accepted only where torch itself calls it backward compatible.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.pytorch import plain_callables
from replayfmt.pytorch.registry import find_overload, is_registered
from replayfmt.pytorch.schemas import parse_schema, printed_schema

from .allowed_imports import FLAG, AllowedImports

# Namespaces whose operators are PyTorch's own: they read no autocast state below the dispatch level of a capture.
OWN_NAMESPACES = frozenset(
    {"aten", "prims", "rngprims", "quantized", "sparse", "mkldnn", "mkl", "onednn"}
)
# Operators that draw random numbers and do not carry the tag that says so.
_UNTAGGED_DRAWS = frozenset({"aten::_no_grad_normal_", "aten::_no_grad_uniform_"})
# PyTorch registers these namespaces only once their module is imported. Ours to choose, never the file's.
_LAZY_NAMESPACES = {
    "prims": "torch._prims",
    "rngprims": "torch._prims.rng_prims",
    "fsdp": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
}
# Operators of PyTorch's that do other things than compute on tensors, or that take tensors apart unchecked. No program
# needs them replayed (the recorder does not write them as ops), so that they are there at all is an attempt.
_HOST_CALLS = {
    "aten::from_file": "acts on files of the machine it was captured on",
    "aten::_print": "prints what the capture says",
    "mkldnn::data_ptr": "gives a memory address",
    "inductor::_alloc_from_pool": "makes tensors without looking whether they fit into their memory",
    "inductor::_reinterpret_tensor": "makes tensors without looking whether they fit into their memory",
}
_HOST_NAMESPACES = {
    "debugprims": "reads files",
    "debug_mode_ops": "is a part of PyTorch's debugging",
    "export": "looks up attributes by name",
    "prim": "belongs to the TorchScript interpreter",
    "profiler": "is a part of the profiler",
    "static_runtime": "belongs to the TorchScript interpreter",
}
_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)


@dataclass(frozen=True)
class ResolvedKernel:
    """An operator overload that stands for a captured kernel."""

    overload: OpOverload
    own: bool       # of one of OWN_NAMESPACES
    draws: bool     # takes random numbers from a generator

    @property
    def dispatcher_name(self) -> str:
        """As the dispatcher spells it: `aten::mm`, `aten::add.Tensor`."""
        return self.overload.name()

    @property
    def content_decides_sizes(self) -> bool:
        """Whether the sizes of its results may depend on what is in its arguments."""
        return not self.own or torch.Tag.dynamic_output_shape in self.overload.tags

    def runs_on(self, device_type: str) -> bool:
        """Whether the dispatcher has any kernel of it for tensors of a device type."""
        key = torch._C._dispatch_key_for_device(device_type)
        return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.dispatcher_name, key))


def resolve(kernel: Kernel, captured_torch: str | None,
            imports: AllowedImports | None = None) -> ResolvedKernel | str:
    """The operator for a captured kernel, or a sentence that says why there is none. `imports`: what the user allows to
    be imported where the operator is not known."""
    named = kernel.qualified_name
    if kernel.kind is not KernelKind.operator:
        return f"{named} is a {kernel.kind.name} kernel; this version replays operators only"
    namespace = kernel.name.partition("::")[0]
    does = _HOST_CALLS.get(kernel.name) or _HOST_NAMESPACES.get(namespace)
    if does is not None:
        return f"{named} {does}; such host calls are not replayed"
    if namespace in _COLLECTIVES:
        return f"{named} is a collective; they are not replayed yet"
    if namespace in _LAZY_NAMESPACES:
        try:
            importlib.import_module(_LAZY_NAMESPACES[namespace])
        except ImportError as error:
            return f"{named} needs {_LAZY_NAMESPACES[namespace]}, which cannot be imported here: {error}"
    overload = find_overload(kernel.name, kernel.overload)
    if overload is None and namespace not in OWN_NAMESPACES:
        imports = imports or AllowedImports()
        imports.provide(kernel.name, lambda: is_registered(kernel.name, kernel.overload))
        overload = find_overload(kernel.name, kernel.overload)
        if overload is None and kernel.overload == plain_callables.OVERLOAD:
            return _by_types(kernel, imports)
        if overload is None:
            return f"{named} does not exist in torch {torch.__version__}; {imports.advice(namespace)}"
    if overload is None:
        return f"{named} does not exist in torch {torch.__version__}"
    difference = _schema_difference(kernel, overload, captured_torch)
    if difference:
        return difference
    tags = overload.tags
    draws = torch.Tag.nondeterministic_seeded in tags or kernel.name in _UNTAGGED_DRAWS
    return ResolvedKernel(overload, namespace in OWN_NAMESPACES, draws)


def _by_types(kernel: Kernel, imports: AllowedImports) -> ResolvedKernel | str:
    """A function of a library that the user named, called by the types that a trace recorded of its arguments."""
    namespace, _separator, base = kernel.name.partition("::")
    function = imports.callable(namespace, base)
    if function is None:
        return (f"{kernel.name} is a function without a schema, and no library was named for {namespace!r} that has "
                f"it: {FLAG}={namespace}=MODULE lets the capture call the functions that MODULE defines")
    try:
        return ResolvedKernel(plain_callables.as_operator(kernel.schema, function), False, False)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{kernel.qualified_name}: its captured schema cannot be read ({reason})"


def _schema_difference(kernel: Kernel, overload: OpOverload, captured_torch: str | None) -> str | None:
    here = printed_schema(overload._schema)
    if here == kernel.schema:
        return None
    versions = f"captured with torch {captured_torch or 'of an unknown version'}, this is torch {torch.__version__}"
    try:
        captured = parse_schema(kernel.schema)
        compatible = overload._schema.is_backward_compatible_with(captured)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, IndexError) as error:  # IndexError: the comparison met other numbers of arguments
        reason = str(error).strip().partition("\n")[0]
        return f"{kernel.qualified_name}: its captured schema cannot be read ({reason}); {versions}"
    if compatible:
        return None
    return f"{kernel.qualified_name} changed: captured {kernel.schema!r}, here {here!r}; {versions}"
