"""Timing a replay: measure (the loop), scopes, statistics; meters, single ops, comparisons and reports in packages.

`measure.measure(plan, options)` gives a `Run`, `reports.rows.make_report(run, plan)` its rows. Imports format,
pytorch and replay; nothing imports it but the tools and the library's face.

The package can be called: `replayfmt.benchmark(path)` is `one_call.benchmark(path)`. A function of that name in
`replayfmt` would be replaced by the package as soon as a module of it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .one_call import benchmark

        return benchmark(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
