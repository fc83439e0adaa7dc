"""Where two captures part: which op of one is which of the other, and the first that differs on equal inputs.

`trace` reads a capture into columns, `structure` says what differs without their results, `alignment` pairs their ops,
`divergence` finds where a difference begins, `distances` says how far apart results are and how far they may be.
`results` holds what is found and shows it, `replayed` makes results, and tolerances, by replays (`chained` those of
blocks), and `comparison` does all of it. Files are read without torch; only `replayed` and `chained` need it.

`repeated` compares replays of one capture with each other. `isolated` runs every op another way on
the same inputs, `bisected` sets of ops, to find those that move the end result.

The package is callable: `replayfmt.compare(a, b)` is `comparison.compare(a, b)`; `repeat(path, 10)` is
what `opreplay-run --repeat` does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_HOME = {
    "bisect": ".bisected",
    "isolate": ".isolated",
    "repeat": ".repeated",
}  # not named like its module, which would take its place


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .comparison import compare

        return compare(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name], __name__), name)


sys.modules[__name__].__class__ = _CallablePackage
