"""Values of a capture as Python expressions. Anything from the file becomes a literal or a checked name, never code."""

from __future__ import annotations

import cmath
import math
from keyword import iskeyword

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.format.model import Device, Kernel
from replayfmt.pytorch.operators import WITH_TORCH_ALONE
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

# The statements that set settings. Other settings matter only if they differ from a new process's.
SETTERS = {
    "num_threads": "torch.set_num_threads({})",
    "default_dtype": "torch.set_default_dtype(torch.{})",
    "grad_enabled": "torch.set_grad_enabled({})",
    "deterministic_debug_mode": "torch.set_deterministic_debug_mode({})",
    "fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory = {}",
    "flush_denormal": "torch.set_flush_denormal({})",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({})",
    "cudnn_allow_tf32": "torch.backends.cudnn.allow_tf32 = {}",
    "cudnn_enabled": "torch.backends.cudnn.enabled = {}",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = {}",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic = {}",
    "mkldnn_enabled": "torch._C._set_mkldnn_enabled({})",
    "mkldnn_deterministic": "torch._C._set_mkldnn_deterministic({})",
    "nnpack_enabled": "torch._C._set_nnpack_enabled({})",
    "sdp_flash": "torch.backends.cuda.enable_flash_sdp({})",
    "sdp_mem_efficient": "torch.backends.cuda.enable_mem_efficient_sdp({})",
    "sdp_math": "torch.backends.cuda.enable_math_sdp({})",
    "sdp_cudnn": "torch.backends.cuda.enable_cudnn_sdp({})",
}
ALWAYS_STATED = ("num_threads", "default_dtype", "grad_enabled")


def setting(name: str, value: object) -> str:
    """The statement that sets a setting. Raises ReplayRefused for one that a script cannot set."""
    if name.startswith("fp32_precision."):
        backend, _, operation = name.removeprefix("fp32_precision.").partition(".")
        return f"torch._C._set_fp32_precision_setter({backend!a}, {operation!a}, {str(value)!a})"
    template = SETTERS.get(name)
    if template is None or not isinstance(value, bool | int | float | str):
        raise ReplayRefused(f"the setting {name} = {value!r} cannot be made by a script")
    if name == "default_dtype":
        return template.format(identifier(str(value)))
    return template.format(scalar(value))


def identifier(name: str) -> str:
    """A valid Python identifier. Raises ReplayRefused for any other name."""
    if not (name.isascii() and name.isidentifier()) or iskeyword(name):
        raise ReplayRefused(f"{name!r} is not a name that a script could use")
    return name


def operator(kernel: Kernel) -> str:
    """How a script calls an operator. Raises ReplayRefused for one that torch alone does not have."""
    namespace, _, base = kernel.name.partition("::")
    if namespace not in WITH_TORCH_ALONE:
        raise ReplayRefused(f"{kernel.qualified_name} is not an operator of torch's own; a script needs only torch")
    if iskeyword(kernel.overload):
        return f"getattr(torch.ops.{namespace}.{identifier(base)}, {kernel.overload!a})"
    return f"torch.ops.{namespace}.{identifier(base)}.{identifier(kernel.overload)}"


def argument(name: str, value: str) -> str:
    """One argument of a call by name; in a dictionary if the name is a Python keyword."""
    if name.isascii() and name.isidentifier() and iskeyword(name):
        return f"**{{{name!a}: {value}}}"
    return f"{identifier(name)}={value}"


def scalar(value: bool | int | float | complex | str | None) -> str:
    """A literal."""
    if isinstance(value, complex):
        if cmath.isfinite(value):
            return f"complex({value.real!r}, {value.imag!r})"
        return f"complex({scalar(value.real)}, {scalar(value.imag)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value!r}")'
    return ascii(value)


def dtype(code: DType) -> str:
    """`torch.float32`. Raises ReplayRefused for one that this torch does not have."""
    if code not in TORCH_DTYPE:
        raise ReplayRefused(f"this torch has no dtype {code.name}")
    return str(TORCH_DTYPE[code])


def enumeration(value: DType | Layout | MemoryFormat) -> str:
    """A dtype, layout or memory format."""
    if isinstance(value, DType):
        return dtype(value)
    return str(TORCH_LAYOUT[value] if isinstance(value, Layout) else TORCH_MEMORY_FORMAT[value])


def device(given: Device) -> str:
    """`"cuda:0"`, as a literal."""
    return ascii(f"{identifier(given.kind)}" + ("" if given.index < 0 else f":{given.index}"))


def comment(text: str) -> str:
    """Text that cannot end its comment: one line of printable characters."""
    return "".join(each if each.isprintable() and each.isascii() else ascii(each)[1:-1] for each in text)
