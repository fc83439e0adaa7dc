"""Runs one step of a check on a GPU: `steps.py NAME`."""

from __future__ import annotations

import importlib
import sys

MODULES = {
    "machine": "eager_steps",
    "capture": "eager_steps",
    "replay": "eager_steps",
    "verification": "eager_steps",
    "per_op": "kernel_steps",
    "probes": "kernel_steps",
    "energy": "kernel_steps",
    "triton": "triton_steps",
    "compiled": "code_steps",
    "streams": "code_steps",
    "ranks": "rank_steps",
    "tests": "code_steps",
}

if __name__ == "__main__":
    getattr(importlib.import_module(MODULES[sys.argv[1]]), sys.argv[1])()
