"""A program's environment and global numeric state: read at capture, compared and applied for a replay.

`session_fields` is what a session records of the environment, and what a replay compares before it promises bitwise
results. `SETTINGS` are the global settings that decide numerics: applied for a replay, and restored afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from replayfmt.errors import CaptureFailed, ReplayRefused, UsageError
from replayfmt.format.model import Device
from replayfmt.format.validation import printable
from replayfmt.version import own_version

from . import accelerators
from .accelerators import kind_here
from .tensors.memory import DTYPE_CODE

Scalar = bool | int | float | str | None

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODE}
_MOST_THREADS = 4096  # more than any machine has; that many would be made at the next op


@dataclass(frozen=True)
class Setting:
    """One setting. `get` is PyTorch's own; `read` is how it is asked."""

    name: str
    get: Callable[[], Scalar]
    set: Callable[[Any], object]

    def read(self) -> Scalar:
        """Its present value. None if PyTorch cannot return it; then it is not recorded. So it is with older settings
        that stand for several newer ones, once those differ: the newer ones are settings of their own."""
        return guarded(self.get)


def guarded(get: Callable[[], Any]) -> Any:
    """The getter's result; None if PyTorch refuses to answer in its present state."""
    try:
        return get()
    except (RuntimeError, AssertionError):
        return None


def _flushes_denormals() -> bool:
    # Python's own floats go through the same processor flag, so one multiplication tells.
    return sys.float_info.min * _HALF == 0.0


_HALF = 0.5


def _c(name: str, getter: str, setter: str) -> Setting | None:
    """A setting behind two functions of torch._C, or None if this build lacks one of them."""
    get, put = getattr(torch._C, getter, None), getattr(torch._C, setter, None)
    return Setting(name, get, put) if get and put else None


def _fp32_precision(backend: str, operation: str) -> Setting | None:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    put = getattr(torch._C, "_set_fp32_precision_setter", None)
    if not (get and put):
        return None
    return Setting(
        f"fp32_precision.{backend}.{operation}",
        lambda: get(backend, operation),
        lambda value: put(backend, operation, value),
    )


def _reduced_precision(name: str, getter: str, attribute: str) -> Setting | None:
    """cuBLAS reduced-precision reduction: the getter gives one flag or (allow reduction, allow split-k)."""
    get = getattr(torch._C, getter, None)
    if get is None:
        return None

    def read() -> str:
        value = get()
        return ",".join(str(int(part)) for part in (value if isinstance(value, tuple) else (value,)))

    def write(value: str) -> None:
        parts = tuple(part == "1" for part in value.split(","))
        setattr(torch.backends.cuda.matmul, attribute, parts if len(parts) > 1 else parts[0])

    return Setting(name, read, write)


def _preferred(library: str) -> Setting | None:
    """The library that CUDA's matrix products (`blas`) or decompositions (`linalg`) prefer, by PyTorch's name."""
    get = getattr(torch._C, f"_get_{library}_preferred_backend", None)
    put = getattr(torch._C, f"_set_{library}_preferred_backend", None)
    names = getattr(torch._C, f"_{library.capitalize()}Backend", None)
    if not (get and put and names):
        return None

    def write(name: str) -> None:
        if name not in names.__members__:
            raise ValueError(f"expected one of {', '.join(names.__members__)}")
        if torch.backends.cuda.is_built():  # nothing else has a choice
            put(names.__members__[name])

    return Setting(f"preferred_{library}", lambda: get().name, write)


def _sdp_priority() -> Setting | None:
    get, put = getattr(torch._C, "_get_sdp_priority_order", None), getattr(torch._C, "_set_sdp_priority_order", None)
    if not (get and put):
        return None
    return Setting(
        "sdp_priority_order",
        lambda: ",".join(str(int(backend)) for backend in get()),
        lambda value: put([int(backend) for backend in value.split(",")]),
    )


def _dtype_named(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name)  # a name out of a file is never looked up in torch itself
    if dtype is None:
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _set_matmul_precision(precision: Scalar) -> None:
    if precision not in ("highest", "high", "medium"):  # torch would only warn
        raise ValueError("expected highest, high or medium")
    torch.set_float32_matmul_precision(str(precision))


def _set_threads(count: Scalar) -> None:
    if type(count) is not int or not 1 <= count <= _MOST_THREADS:
        raise ValueError(f"expected a number of threads from 1 to {_MOST_THREADS}")
    torch.set_num_threads(count)


_CANDIDATES: tuple[Setting | None, ...] = (
    Setting("grad_enabled", torch.is_grad_enabled, torch._C._set_grad_enabled),
    Setting(
        "default_dtype",
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda value: torch.set_default_dtype(_dtype_named(value)),
    ),
    Setting("deterministic_debug_mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _c(
        "fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
    Setting("num_threads", torch.get_num_threads, _set_threads),
    Setting("flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    Setting("float32_matmul_precision", torch.get_float32_matmul_precision, _set_matmul_precision),
    _c("cudnn_allow_tf32", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    # After the older flags above, which write some of these too.
    _fp32_precision("generic", "all"),
    *(
        _fp32_precision(backend, operation)
        for backend in ("cuda", "mkldnn")
        for operation in ("all", "matmul", "conv", "rnn")
    ),
    _reduced_precision(
        "cublas_fp16_reduced_precision",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ),
    _reduced_precision(
        "cublas_bf16_reduced_precision",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ),
    _c("cublas_fp16_accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    _c(
        "cpu_fp16_reduced_precision",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
    _preferred("blas"),
    _preferred("linalg"),
    _c("cudnn_enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    _c("cudnn_benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _c("cudnn_deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    _c("mkldnn_enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    _c("mkldnn_deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    _c("nnpack_enabled", "_get_nnpack_enabled", "_set_nnpack_enabled"),
    _c("quantized_engine", "_get_qengine", "_set_qengine"),
    _c("sdp_flash", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    _c("sdp_mem_efficient", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    _c("sdp_math", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    _c("sdp_cudnn", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    _c(
        "sdp_math_reduced_precision",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    _sdp_priority(),
)
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _CANDIDATES if setting is not None}

_AUTOCAST_NAME = re.compile(r"autocast\.([a-z][a-z0-9_]*)")
# In others it computes nothing: it warns, and is off.
_AUTOCAST = {"": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast_devices() -> tuple[str, ...]:
    """The kinds of devices whose autocast is stated: the host, CUDA, and this PyTorch's accelerator."""
    kind = kind_here()
    return ("cpu", "cuda") if kind in ("", "cuda") else ("cpu", "cuda", kind)


def autocast_dtype(device: str) -> str:
    """The dtype's name that autocast computes in on a kind of device; "" while it is off."""
    if not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def read_settings(names: tuple[str, ...] | None = None) -> dict[str, Scalar]:
    """The present value of the named settings (default: all of them, with `autocast.<device>`).

    Autocast reads as the dtype's name, or "" while it is off.
    """
    values: dict[str, Scalar] = {}
    for name in names if names is not None else SETTINGS:
        value = SETTINGS[name].read()
        if value is not None:
            values[name] = value
    if names is None:
        values.update({f"autocast.{device}": autocast_dtype(device) for device in autocast_devices()})
    return values


def check_settings(values: Mapping[str, Scalar]) -> list[str]:
    """What of `values` this build cannot set, each as a sentence."""
    return [
        f"the setting {_shown(name, value)} does not exist in torch {torch.__version__}"
        for name, value in values.items()
        if name not in SETTINGS and not _AUTOCAST_NAME.fullmatch(name)
    ] + [
        problem
        for name, value in values.items()
        if _AUTOCAST_NAME.fullmatch(name) and value is not None and (problem := _no_autocast(name, value))
    ]


def _no_autocast(name: str, value: Scalar) -> str:
    """Why autocast of a kind of device cannot be as a value says; "" if it can. Off it is wherever there is none."""
    if value not in _AUTOCAST:
        return f"the setting {_shown(name, value)} cannot be set here: autocast computes in bfloat16 or float16"
    kind = name.removeprefix("autocast.")
    if value and not guarded(lambda: torch.amp.is_autocast_available(kind)):
        return f"the setting {_shown(name, value)} cannot be set here: this torch has no autocast for {kind}"
    return ""


def apply_settings(values: Mapping[str, Scalar], present: Mapping[str, Scalar] | None = None) -> None:
    """Set every setting in `values`, in the table's order; autocast entries are left to `autocast_as_captured`.
    `present` are their values now, where these were read just before.

    Raises ReplayRefused if a value is refused by torch, or it goes on with another one.
    """
    if present is not None and all(_same(present.get(name), values[name]) for name in SETTINGS if name in values):
        return
    for name in SETTINGS:
        if name in values:
            _apply(name, values[name])
    for name in _fixed:  # what was set after them may have changed them
        _apply(name, _fixed[name])


_fixed: dict[str, Scalar] = {}


@contextmanager
def settings_fixed(values: Mapping[str, Scalar]) -> Iterator[None]:
    """Inside, every replay runs with these settings, whatever its capture says.

    Raises ReplayRefused for one that cannot be set here.
    """
    global _fixed
    outside = _fixed
    with preserved_settings():
        _fixed = {**outside, **values}
        try:
            apply_settings(values)
            yield
        finally:
            _fixed = outside


@contextmanager
def settings_changed(values: Mapping[str, Scalar], names: tuple[str, ...]) -> Iterator[None]:
    """Inside, these settings are as given. `names` are those that this changes: only they are put back."""
    before = read_settings(names)
    for name, value in values.items():
        _put(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


def changed_by(values: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The names of all settings that setting these changes, in the table's order. Raises ReplayRefused for one that
    cannot be set here."""
    with preserved_settings() as before:
        for name, value in values.items():
            _put(name, value)
        after = read_settings()
    return tuple(name for name in SETTINGS if name in values or before.get(name) != after.get(name))


_SHORT = {
    "threads": "num_threads",
    "deterministic": "deterministic_debug_mode",
    "matmul_precision": "float32_matmul_precision",
    "tf32": "fp32_precision.cuda.matmul",
}
_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def parse_setting(text: str) -> tuple[str, Scalar]:
    """A setting as NAME=VALUE: its name in a capture's session, or short. Raises UsageError."""
    given, equals, value = text.partition("=")
    name = next((each for each in (_SHORT.get(given, given), f"{given}_enabled") if each in SETTINGS), None)
    if name is None or not equals:
        known = ", ".join([*_SHORT, *SETTINGS])
        raise UsageError(f"--set={printable(text, 200)}: expected NAME=VALUE with one of {known}")
    present, switch = SETTINGS[name].read(), _SWITCH.get(value.lower())
    if given == "tf32" and switch is not None:
        return name, "tf32" if switch else "ieee"
    if isinstance(present, bool) and switch is not None:
        return name, switch
    if type(present) is int and value.isdecimal():
        return name, int(value)
    if type(present) is int and switch is not None:
        return name, 2 * int(switch)  # deterministic_debug_mode: 2 refuses what is not
    if isinstance(present, str) and value:
        return name, value
    raise UsageError(f"--set={printable(text, 200)}: {printable(value, 100)!r} is no value of {name}, now {present!r}")


def replayed_settings(captured: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings that a replay of a capture with these runs under."""
    return {**captured, **_fixed}


@functools.cache
def set_up_vector_math() -> None:
    """Have one thread call MKL's vector functions first, once in a process. Where two threads make the first call at
    once, on a busy machine, its result may have other bits: seen of `exp` in one of some 300 processes. A profiler of
    the program would show the call, so under one it is left out."""
    if not torch.autograd._profiler_enabled():
        torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))


def replay_threads(captured: object) -> tuple[int, str]:
    """With how many threads a replay runs, and why that may surprise. `captured` is the capture's number, if it has
    one: other numbers of threads add up in another order, so only --threads overrides it."""
    fixed = _fixed.get("num_threads")
    if isinstance(fixed, int):
        return fixed, "--threads"
    if not isinstance(captured, int):
        return torch.get_num_threads(), ""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) != captured:
        return captured, f"as captured; --threads={int(asked)} for OMP_NUM_THREADS"
    return captured, ""


def _apply(name: str, value: Scalar) -> None:
    _put(name, _fixed.get(name, value))


def _put(name: str, value: Scalar) -> None:
    setting = SETTINGS[name]
    if _same(setting.read(), value):
        return
    try:
        setting.set(value)
    except Exception as error:  # a value may be anything, and setters check theirs in many ways
        reason = printable((str(error).splitlines() or [type(error).__name__])[0], 300)  # it may quote the value
        raise ReplayRefused(f"the setting {_shown(name, value)} cannot be set here: {reason}") from error


def _shown(name: str, value: Scalar) -> str:
    """A setting as a message says it: both are a capture's, and may be of any length."""
    return f"{printable(name, 200)} = {printable(repr(value), 200)}"


def _same(one: Scalar, other: Scalar) -> bool:
    return type(one) is type(other) and one == other


@contextmanager
def preserved_settings() -> Iterator[dict[str, Scalar]]:
    """Put every setting back as it was on leaving: all that can be, also where one of them resists. Gives them.

    Raises ReplayRefused for the first one that does.
    """
    before = read_settings()
    try:
        yield before
    finally:
        refused = None
        for name in SETTINGS:
            if name in before:
                try:
                    _apply(name, before[name])
                except ReplayRefused as error:
                    refused = refused or error
        if refused is not None:
            raise refused


@contextmanager
def autocast_as_captured(values: Mapping[str, Scalar]) -> Iterator[None]:
    """Autocast on or off per device as `values` say, for the call of one custom operator.

    Raises ReplayRefused for a value that is no dtype of autocast's.
    """
    with ExitStack() as stack:
        for name, value in values.items():
            found = _AUTOCAST_NAME.fullmatch(name)
            if found and (problem := _no_autocast(name, value)):
                raise ReplayRefused(problem)
            if found and value:
                stack.enter_context(torch.autocast(found[1], dtype=_AUTOCAST[str(value)]))
        yield


PRODUCER = "opreplay"
# What a fingerprint has of a device's properties, as PyTorch's modules for devices name them.
_PROPERTIES = {
    "memory_bytes": "total_memory",
    "multiprocessors": "multi_processor_count",
    "compute_units": "max_compute_units",
    "driver": "driver_version",
}
# What CUDA's libraries read from the environment when they are first used.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")


def cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide numerics in this build, by name."""
    versions = {"torch_git": str(torch.version.git_version)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions |= _wheels(torch.version.cuda.partition(".")[0])
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    if torch.version.xpu:
        versions["xpu"] = torch.version.xpu
    cudnn: Any = getattr(torch._C, "_cudnn", None)
    if cudnn is not None:  # torch.backends.cudnn.version() initializes CUDA's driver
        versions["cudnn"] = ".".join(map(str, cudnn.getRuntimeVersion()))
    for line in torch.__config__.parallel_info().splitlines():  # `show` initializes CUDA's driver
        text = line.strip(" -")
        if "Math Kernel Library Version" in text:
            versions["mkl"] = text
        elif "MKL-DNN" in text:
            versions["mkldnn"] = text
    return versions | _variables()


@functools.cache
def _wheels(cuda: str) -> dict[str, str]:
    """The versions of the wheels of CUDA's libraries, where these came as wheels. No library is asked."""
    versions = {}
    for name in ("nvidia-cublas", "nvidia-cudnn"):
        for each in (name, f"{name}-cu{cuda}"):
            with suppress(PackageNotFoundError):
                versions[each] = version(each)
    return versions


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def cpu_capability() -> str:
    """The vector extension that torch's CPU kernels were chosen for."""
    return torch.backends.cpu.get_cpu_capability()


def describe_device(device: torch.device) -> Device:
    """The captured form of a device, with a fingerprint of what its module says of it."""
    if device.type == "cpu":
        return Device("cpu", -1, cpu_model() or "", json.dumps({"capability": cpu_capability()}))
    index = device.index
    if not accelerators.in_use(device.type) or (index or 0) >= accelerators.count(device.type):
        # Of a GPU that is not there (an op that was given it has raised), or not used, nothing more is known.
        return Device(device.type, -1 if index is None else index)
    properties = accelerators.properties_of(device)
    fingerprint: dict[str, Any] = {}
    if hasattr(properties, "major") and hasattr(properties, "minor"):
        fingerprint["capability"] = f"{properties.major}.{properties.minor}"
    fingerprint |= {name: getattr(properties, of) for name, of in _PROPERTIES.items() if hasattr(properties, of)}
    if device.type == "cuda":  # programs may set them until they use the device
        fingerprint |= _variables()
    text = json.dumps(fingerprint) if fingerprint else ""
    return Device(device.type, accelerators.index_of(device), accelerators.name_of(device), text)


def _integer_variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise CaptureFailed(f"the environment variable {name} is {text!r}, expected an integer") from error


def session_fields() -> dict[str, Any]:
    """Keyword arguments for `model.Session` that describe this process; settings and policies are the recorder's."""
    return {
        "session_id": str(uuid.uuid4()),
        "producer": PRODUCER,
        "producer_version": own_version(),
        "created_unix_ns": time.time_ns(),
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "host": platform.node() or None,
        "cpu": cpu_model(),
        "cpu_capability": cpu_capability(),
        "argv": tuple(sys.argv),
        "working_directory": os.getcwd(),
        "rank": _integer_variable("RANK", 0),
        "world_size": _integer_variable("WORLD_SIZE", 1),
        "libraries": library_versions(),
    }
