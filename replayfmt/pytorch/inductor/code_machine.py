"""What a compiled C++ kernel must find again to run as it did: this processor, this PyTorch, this Python."""

from __future__ import annotations

import functools
import hashlib
import platform
import sysconfig
from pathlib import Path

import torch

from ..environment import cpu_capability, cpu_model


@functools.cache
def machine_of_code() -> dict[str, str]:
    """What a library depends on that was compiled for the machine at hand, by name."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_model() or "",
        "cpu_features": _features(),
        "cpu_capability": cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "python": str(sysconfig.get_config_var("SOABI")),
        "torch": torch.__version__,
    }


def differences(captured: dict[str, str]) -> list[str]:
    """The names of what is different here."""
    here = machine_of_code()
    return [name for name in here if captured.get(name) != here[name]]


def _features() -> str:
    """A digest of what the processor can do; "" if the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    return ""
