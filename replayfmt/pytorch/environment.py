"""A program's environment: what a session records of it, and what a replay compares before it promises bitwise
results."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import time
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from replayfmt.errors import CaptureFailed
from replayfmt.format.model import Device
from replayfmt.version import own_version

from . import accelerators

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
    """The name of the processor."""
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
