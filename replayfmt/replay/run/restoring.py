"""Putting content in place as each execution of a plan does, without its ops: to measure what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from ..codegen.windows import Window
from .content import Content


class Restoring:
    """`windows` are those of unverified executions. The next execution does all of it again."""

    def __init__(
        self, content: Content, windows: Iterable[Window], surroundings: Callable[[], AbstractContextManager[None]]
    ) -> None:
        staged = [each for window in windows for each in (content.ready(window) or window).staged]
        self._content, self._staged, self._surroundings = content, staged, surroundings

    def __bool__(self) -> bool:
        """Whether executions after the first put anything in place. Known once there was one."""
        return bool(self._staged)

    def __call__(self) -> None:
        with self._surroundings():
            for each in self._staged:
                self._content.stage(each)
