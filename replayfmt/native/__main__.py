"""Builds the libraries for the PyTorch and Python that run it, to be shipped in a wheel."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from .building import NotAvailable, build_all, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m replayfmt.native", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the libraries are written; made where it is not there")
    directory = parser.parse_args().directory
    try:
        built = build_all(directory)
    except (NotAvailable, OSError) as problem:
        say(f"no libraries for PyTorch {torch.__version__} ({problem})")
        return 1
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"{len(built)} libraries for PyTorch {torch.__version__} and Python {python} in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
