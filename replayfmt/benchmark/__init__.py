"""`replayfmt.benchmark(path)` measures a replay, as this explains:
`from replayfmt.benchmark.convenience import benchmark; help(benchmark)`.

Timing a replay: `measure` (the loop), `meters`, `statistics`, `run_report`; single ops in `per_op`,
energy in `energy`.

`measure.measure(plan, options)` returns a `Run`, `run_report.make_report(run, plan)` its rows. Imports format,
pytorch and replay; only the tools and the library's public API import it.

The package is callable: `replayfmt.benchmark(path)` is `convenience.benchmark(path)`. A function of that name in
`replayfmt` would be overwritten by the package as soon as one of its modules is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .convenience import benchmark

        return benchmark(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
