"""Kernels to put probes into: eight of Triton, four of CUDA, two by hand, as PTX.

`tests/probes/ptx/` holds the PTX of all of them, so that most tests need no compiler; `python tests/probes/kernels.py`
writes it anew with Triton (for sm_80 and sm_90) and nvcc. Triton's has the folder it was made in: copy the tests to a
folder whose name may be known first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "ptx"
ARCHITECTURES = (80, 90)

CUDA = """
extern "C" __global__ void cuda_fill(float *out, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = value;
}

extern "C" __global__ void cuda_saxpy(const float *x, float *y, float a, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = a * x[i] + y[i];
}

extern "C" __global__ void cuda_transpose(const int *in, int *out, int width, int height) {
    __shared__ int tile[16][17];
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x < width && y < height) tile[threadIdx.y][threadIdx.x] = in[y * width + x];
    __syncthreads();
    x = blockIdx.y * 16 + threadIdx.x;
    y = blockIdx.x * 16 + threadIdx.y;
    if (x < height && y < width) out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void cuda_collatz(const unsigned *in, unsigned *steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned value = in[i], count = 0;
    while (value > 1) {
        if (value & 1) value = 3 * value + 1; else value >>= 1;
        ++count;
    }
    steps[i] = count;
}
"""
CUDA_KERNELS = ("cuda_fill", "cuda_saxpy", "cuda_transpose", "cuda_collatz")
BY_HAND = ("predicated_return", "overwritten_address")
# Name, grid axes used, pointer types, constants.
TRITON_KERNELS = (
    "triton_add", "triton_fill", "triton_relu", "triton_gather", "triton_row_sum", "triton_softmax", "triton_transpose",
    "triton_matmul",
)  # fmt: skip


def ptx(name: str, architecture: int | None = None) -> str:
    """The PTX of a kernel, as it lies here."""
    return (FOLDER / (f"{name}_sm{architecture}.ptx" if architecture else f"{name}.ptx")).read_text()


def triton_ptx(name: str, architecture: int) -> str:
    """The PTX that the installed Triton makes of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import triton_sources

    signature, constants = triton_sources.SIGNATURES[name]
    kernel = getattr(triton_sources, name)
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(
        kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, {**constants}, {**aligned}
    )  # fmt: skip
    options: dict[str, Any] = {"num_warps": 2}
    return str(triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"])


def nvcc_ptx(architecture: int = 80) -> str:
    """The PTX that the installed nvcc makes of all the CUDA kernels."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernels.cu"), Path(folder, "kernels.ptx")
        source.write_text(CUDA)
        command = ["nvcc", "-ptx", f"-arch=sm_{architecture}", "-o", str(out), str(source)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=300)
        return out.read_text()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for architecture in ARCHITECTURES:
        for name in TRITON_KERNELS:
            # Of the files that debug lines name, their folders are nobody's business.
            text = re.sub(r'(\.file\t\d+ )"[^"]*/', r'\1"', triton_ptx(name, architecture))
            (FOLDER / f"{name}_sm{architecture}.ptx").write_text(text)
    (FOLDER / "cuda.ptx").write_text(nvcc_ptx())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from probes.kernels import main as in_package

    in_package()
