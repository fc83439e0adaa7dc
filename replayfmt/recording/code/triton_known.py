"""What is known of the Triton kernels of a program, which may change what they are made of while they are launched."""

from __future__ import annotations

from typing import Any, NamedTuple

from replayfmt.pytorch.triton.forms import FormMaker, NotRepresentable
from replayfmt.pytorch.triton.functions import KernelFunction, NotStandalone, is_callable_of_triton
from replayfmt.pytorch.triton.same_code import compiled_difference, interpreted_difference
from replayfmt.pytorch.triton.sources import StandaloneSource, standalone_source

_MOST_VERSIONS = 8  # of one kernel


class KnownKernel(NamedTuple):
    """A decorated function, and the functions that it is given, as they were at one time."""

    decorated: tuple[Any, ...]
    function: KernelFunction
    source: StandaloneSource
    forms: FormMaker

    @classmethod
    def of(cls, kernel: Any, functions: tuple[Any, ...]) -> KnownKernel:
        """As they are now. Raises NotStandalone, NotRepresentable."""
        function, source = KernelFunction.of(kernel), standalone_source(kernel, functions)
        return cls((kernel, *functions), function, source, FormMaker(function, source))


class KnownKernels:
    """Those of one capture."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, ...], list[KnownKernel]] = {}  # by the decorated objects' ids, latest last
        self._ran: dict[Any, KnownKernel | str] = {}  # by what was compiled, or the source of what is interpreted

    def at_this_time(self, kernel: Any, values: tuple[Any, ...]) -> KnownKernel:
        """A kernel and the functions among its arguments, as they are now as far as that is quick to tell. Raises
        NotStandalone, NotRepresentable."""
        functions = tuple({id(each): each for each in values if is_callable_of_triton(each)}.values())
        versions = self._versions.setdefault((id(kernel), *map(id, functions)), [])
        if not versions or not versions[-1].source.holds():
            _add(versions, KnownKernel.of(kernel, functions))
        return versions[-1]

    def what_ran(self, now: KnownKernel, compiled: Any) -> KnownKernel | str:
        """What a launch ran, or why that is not known. `now`: what `at_this_time` gave; `compiled`: what Triton had
        compiled of it, perhaps long before."""
        if compiled is None and not now.function.interpreted:
            return now  # Inductor has kept it for itself
        made = now.source if compiled is None else compiled
        if made not in self._ran:
            self._ran[made] = (
                interpreted_difference(now.source) or now if compiled is None else self._compiled_from(now, compiled)
            )
        return self._ran[made]

    def _compiled_from(self, now: KnownKernel, compiled: Any) -> KnownKernel | str:
        difference = compiled_difference(now.source, compiled)
        if not difference:
            return now
        kernel, *functions = now.decorated
        versions = self._versions[tuple(map(id, now.decorated))]
        for each in versions[-2::-1]:
            if not compiled_difference(each.source, compiled):
                return each
        # Not all that a kernel is made of tells when it changes.
        try:
            new = KnownKernel.of(kernel, tuple(functions))
        except (NotStandalone, NotRepresentable):
            return difference
        if new.source.text != now.source.text and not compiled_difference(new.source, compiled):
            _add(versions, new)
            return new
        return difference


def _add(versions: list[KnownKernel], new: KnownKernel) -> None:
    versions.append(new)
    del versions[:-_MOST_VERSIONS]
