"""This package's version."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """The version that is installed. A source tree on PYTHONPATH has none."""
    try:
        return metadata.version("opreplay")
    except metadata.PackageNotFoundError:
        return "not installed"
