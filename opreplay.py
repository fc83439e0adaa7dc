"""`import opreplay` gives what `import replayfmt` gives, under the name of the distribution.

A module and no package: the library's own modules have one name, `replayfmt.…`, so none is ever imported twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import replayfmt

if TYPE_CHECKING:
    from replayfmt import *  # noqa: F403

__all__ = replayfmt.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:  # __path__ above all, which would make a package of it
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(replayfmt, name)


def __dir__() -> list[str]:
    return list(__all__)
