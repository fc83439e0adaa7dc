"""A binary of the user's own in place of the one that Triton compiled for a captured launch.

It is launched as the captured one is: by Triton's launcher, with the parameters of the captured binary, for arguments
of the captured specialization. What a cubin does not say is in a sidecar: a JSON object with `shared`, the bytes of
dynamic shared memory, and where they differ from the captured kernel `name`, `num_warps` and others. What Triton's
cache has beside each cubin is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .compiled import StoredBinary, argument_places, target_of
from .cubins import Cubin, CubinKernel

_SHARED = "shared"
_COUNTS = (
    _SHARED,
    "num_warps",
    "num_ctas",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
    "tmem_size",
)
_FLAGS = ("launch_cooperative_grid", "launch_pdl")
_TAKEN = ("name", *_COUNTS, *_FLAGS)
_OF_TRITON = "triton_version"  # in the sidecars that Triton writes, with more than is taken


@dataclass(frozen=True)
class GivenCubin:
    """A cubin as the user gave it. `entry`: the kernel in it, "" if the user named none. `sidecar`: what it says, None
    if there is none."""

    content: bytes
    entry: str
    sidecar_path: str
    sidecar: Any


class GivenBinary(StoredBinary):
    """A binary that takes the place of a stored one, whatever options that was compiled with."""

    def difference(self, signature: Any, constants: Any, attrs: Any, options: Mapping[str, Any]) -> str:
        return super().difference(signature, constants, attrs, {})


def given_binary(
    stored: StoredBinary, given: GivenCubin, target: Any, version: str, most_shared_bytes: int
) -> GivenBinary:
    """The cubin for launches of the kernel that `stored` is the binary of, on a target where a block has at most so
    much shared memory, by a version of Triton. Raises ValueError that says why it cannot take its place."""
    if target.backend != "cuda":
        raise ValueError(f"it is a cubin, and Triton launches for {target.backend} here")
    if version != stored.triton:
        raise ValueError(f"it would be launched as Triton {stored.triton} did, and this is Triton {version}")
    cubin = Cubin.read(given.content)
    said = _said(given)
    kernel = _entry(cubin, str(given.entry or said.get("name", "")), stored.name)
    problem = cubin.mismatch(target.arch)
    if problem:
        raise ValueError(problem)
    _check_parameters(kernel, stored)
    if said[_SHARED] > most_shared_bytes:
        raise ValueError(f"it needs {said[_SHARED]:,} bytes of shared memory, this device has {most_shared_bytes:,}")
    warps = said.setdefault("num_warps", _warps(kernel, target.warp_size) or stored.metadata["num_warps"])
    threads = warps * target.warp_size
    for limit, fits, text in (
        (kernel.exact_threads, threads == kernel.exact_threads, "with blocks of exactly"),
        (kernel.most_threads, threads <= (kernel.most_threads or threads), "with blocks of at most"),
    ):
        if limit is not None and not fits:
            raise ValueError(
                f"its {kernel.name} is to be launched {text} {limit} threads, and num_warps={warps} makes {threads}"
            )
    compiled = {**stored.metadata, **said, "name": kernel.name, "target": target_of(target)}
    metadata = {
        "target": target_of(target),
        "compiled": compiled,
        "specialization": stored.specialization,
        "sha256": {"cubin": hashlib.sha256(given.content).hexdigest()},
    }
    return GivenBinary(metadata, {"cubin": given.content})


def _said(given: GivenCubin) -> dict[str, Any]:
    """What the sidecar says, as far as it is taken."""
    where = given.sidecar_path
    if given.sidecar is None:
        raise ValueError(
            "a cubin does not say how much dynamic shared memory its kernel needs: write "
            f'{{"{_SHARED}": BYTES}} to {where}, where Triton writes it, too'
        )
    if not isinstance(given.sidecar, dict) or _SHARED not in given.sidecar:
        raise ValueError(f"{where} is not a JSON object with {_SHARED!r}")
    said = {key: value for key, value in given.sidecar.items() if key in _TAKEN}
    unknown = sorted(set(given.sidecar) - set(said))
    if unknown and _OF_TRITON not in given.sidecar:
        raise ValueError(f"{where} has {', '.join(map(ascii, unknown))}; expected some of {', '.join(_TAKEN)}")
    for key, value in said.items():
        least = 1 if key in ("num_warps", "num_ctas") else 0
        if key in _COUNTS and not (type(value) is int and value >= least):
            raise ValueError(f"{where}: {key} is {value!a}; expected {least} or more")
        if key not in _COUNTS and type(value) is not (bool if key in _FLAGS else str):
            raise ValueError(f"{where}: {key} is {value!a}; expected {'true or false' if key in _FLAGS else 'a name'}")
    return said


def _entry(cubin: Cubin, name: str, captured: str) -> CubinKernel:
    """The kernel of this name; without a name, the only one, or the one that is called as the captured one is."""
    there = ", ".join(sorted(cubin.kernels)) or "none"
    if not name:
        name = next(iter(cubin.kernels)) if len(cubin.kernels) == 1 else captured
    if name not in cubin.kernels:
        raise ValueError(f"it has no kernel {name}; its kernels are {there} (FILE:NAME names one)")
    return cubin.kernels[name]


def _check_parameters(kernel: CubinKernel, stored: StoredBinary) -> None:
    """Triton passes the arguments, and then the addresses of memory of its own, which a kernel need not take."""
    captured = Cubin.read(stored.stages["cubin"]).kernels.get(stored.name) if "cubin" in stored.stages else None
    if captured is None:
        raise ValueError("the capture has no cubin of the kernel, whose parameters it would have to take")
    names = argument_places(stored.specialization["signature"])
    expected, found = captured.parameter_bytes, kernel.parameter_bytes
    if found != expected[: max(len(found), len(names))]:
        there = ", ".join(f"{name} ({size})" for name, size in zip(names, expected, strict=False))
        raise ValueError(
            f"its {kernel.name} takes {len(found)} parameters, of {', '.join(map(str, found)) or 'no'} bytes; expected "
            f"{len(names)} and up to {len(expected) - len(names)} addresses of Triton's: {there or 'none'}"
        )


def _warps(kernel: CubinKernel, warp_size: int) -> int | None:
    exact = kernel.exact_threads
    return exact // warp_size if exact is not None and exact % warp_size == 0 else None
