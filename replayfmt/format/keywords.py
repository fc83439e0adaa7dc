"""Keywords of a function that are the fields of a dataclass of options, as `help()` and editors show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])


def explained(keywords: type, options: type) -> Callable[[Function], Function]:
    """A decorator for a function whose last keywords are those of a TypedDict: each is shown with its type and default,
    and explained as in the dataclass whose fields they are."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        hints = get_type_hints(keywords)
        by_name = {each.name: each for each in fields(options)}
        for name, hint in hints.items():
            default = by_name[name].default
            if default is MISSING:
                raise TypeError(f"{options.__name__}.{name} has no default")
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        said = [inspect.cleandoc(each.__doc__ or "") for each in (function, options)]
        function.__doc__ = "\n\n".join(said)
        return function

    return decorate
