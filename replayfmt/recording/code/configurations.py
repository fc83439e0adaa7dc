"""What autotuners could have launched in place of what they chose, kept for a replay that chooses once more.

For each distinct launch: every configuration, with the arguments that it would have changed, the grid among them. The
program's functions say what these are: a grid's and those of `triton.heuristics`, which Triton calls as often as it
likes, are asked once for each configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from replayfmt.format.attachments import CHOICE, CONFIGURATIONS
from replayfmt.pytorch.triton.kernels import KernelCode, LaunchForm, NotRepresentable, launch_text
from replayfmt.pytorch.triton.sources import enclosed_by

from ..kernels import Attached

_MOST_LAUNCHES = 10_000  # distinct ones; of the others a replay that chooses again says that it has no configurations
_PLAIN = (bool, int, float, str)


class Alternative(NamedTuple):
    """What a launch is with one configuration: its parameters by name, its options, its grid or what gives it."""

    configuration: str
    bound: Mapping[str, Any]
    options: Mapping[str, Any]
    grid: Any


class CannotTell(Exception):
    """The configurations of a launch cannot be kept. The text says why."""


class Configurations:
    """Those of one capture."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, ...], dict[str, Any]] = {}  # by source, function and launch
        self._seen: set[Any] = set()

    def note(
        self,
        code: KernelCode,
        form: LaunchForm,
        chosen: str,
        depends_on: Any,
        alternatives: Callable[[], Iterable[tuple[str, LaunchForm]]],
    ) -> None:
        """A launch with the configuration `chosen`. `depends_on`: what else than its arguments decides `alternatives`,
        which gives each configuration and the launch with it, or raises CannotTell."""
        told = (str(code.identity["source_sha256"]), code.name, launch_text(form.arguments.items()))
        if (told, depends_on) in self._seen or len(self._seen) >= _MOST_LAUNCHES:
            return
        self._seen.add((told, depends_on))
        row: dict[str, Any] = dict(zip(CHOICE, (*told, chosen), strict=True))
        try:
            row["configurations"] = {name: dict(_changed(form, other)) for name, other in alternatives()}
        except (CannotTell, NotRepresentable) as problem:
            row["reason"] = str(problem)
        except Exception as error:  # of the program's functions
            row["reason"] = f"what its launch would be could not be told: {type(error).__name__}: {error}"
        before = self._rows.setdefault(told, row)
        if before != row:
            del before["configurations"]
            before["reason"] = "launches that look the same have different configurations"

    @property
    def attached(self) -> list[Attached]:
        text = json.dumps({"rows": list(self._rows.values())}, indent=1)
        return [Attached(CONFIGURATIONS, "configurations.json", text.encode())] if self._rows else []


def _changed(form: LaunchForm, other: LaunchForm) -> Iterator[tuple[str, Any]]:
    """The arguments that differ between two launches. Raises CannotTell if not these alone do."""
    if (form.types, form.parameters, form.options) != (other.types, other.parameters, other.options):
        raise CannotTell("its configurations take other arguments")
    for name, value in other.values.items():
        if name == form.grid:
            yield name, list(value)
        elif value is not form.values[name] and value != form.values[name]:
            if name not in form.keyword_only or not isinstance(value, _PLAIN):
                raise CannotTell(f"its configurations change its argument {name}")
            yield name, value


def of_autotuner(
    tuner: Any, tried: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each configuration of `triton.autotune`, and what a launch is given by name with it. `kwargs` are those with the
    best one, `tried` those configurations that it has just tried. Raises CannotTell."""
    configurations = tuner.configs
    if any(each.pre_hook is not None for each in configurations):
        raise CannotTell("its configurations have hooks, which are code of the program")
    if getattr(tuner, "early_config_prune", None) or getattr(tuner, "perf_model", None):
        if not tried:
            raise CannotTell("its autotuner leaves configurations out, and had chosen before the launch was captured")
        configurations = tried
    heuristics, chosen = [], tuner.best_config.all_kwargs()
    inner = tuner.fn
    while hasattr(inner, "fn") and hasattr(inner, "values"):
        heuristics.append(inner)
        inner = inner.fn
    for each in configurations:
        given = {name: value for name, value in kwargs.items() if name not in chosen} | each.all_kwargs()
        for one in heuristics:
            for name, function in one.values.items():
                given[name] = function({**dict(zip(one.arg_names, args, strict=False)), **given})
        yield str(each), given


def captured_by(function: Any) -> Any:
    """What a function of the program may depend on besides its arguments: numbers as they are, others by identity."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    scope = getattr(function, "__globals__", {})
    values = [*enclosed_by(function).values(), *(function.__defaults__ or ())]
    values += [scope.get(name) for name in code.co_names]
    return code, tuple(each if type(each) in (int, float, bool, str) else id(each) for each in values)
