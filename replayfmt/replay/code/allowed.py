"""The gate to code in captures: kernels that are no operators run machine code or Python source from the file.

Without `allow_code` such a kernel is a finding, and no byte of its attachments is looked at. With it the attachments of
all of them, those of graphs included, are read and verified before any is given to the resolver of its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import contents_of, roles_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.reader import CaptureReader

from ..planning.kernels import ResolvedKernel
from .inductor_cpp import admit_inductor_cpp, resolve_inductor_cpp
from .triton_kernels import admit_triton, prepare_triton, resolve_triton

FLAG = "--allow-code"
# What makes a kernel of its attachments, by role (replayfmt.format.attachments says which roles are given), for a
# replay on these types of devices; or a sentence that says why it cannot, beginning with the kernel's name. It may
# compile, load and import what it is given: it is called only where the user allowed that.
Resolver = Callable[[Kernel, Callable[[], Mapping[str, bytes]], frozenset[str]], ResolvedKernel | str]

RESOLVERS: dict[KernelKind, Resolver] = {
    KernelKind.triton: resolve_triton,
    KernelKind.inductor_cpp: resolve_inductor_cpp,
}
# What is wrong with a kernel's attachments, or "": it runs nothing of them.
ADMITTED: dict[KernelKind, Callable[[Kernel, Callable[[], Mapping[str, bytes]]], str]] = {
    KernelKind.triton: admit_triton,
    KernelKind.inductor_cpp: admit_inductor_cpp,
}


class AllowedCode:
    """Whether code of one capture may run. `device_types` are those that the replay uses. `not_admitted`: what is wrong
    with code of this replay, shared by its capture and the bodies of its graphs: while there is any, none runs. None:
    each kernel is on its own."""

    def __init__(
        self, reader: CaptureReader, allowed: bool, device_types: frozenset[str], not_admitted: list[str] | None = None
    ) -> None:
        self._reader, self._allowed, self._device_types = reader, allowed, device_types
        self._refused: Counter[KernelKind] = Counter()
        self._problems: dict[Kernel, str] = {}
        self._not_admitted = not_admitted

    def prepare(self) -> None:
        """Before anything of the user's is imported, and before any kernel is resolved: have all code verified, and
        libraries imported as the kernels need them."""
        if self._allowed:
            code = [each for each in self._reader.kernels if each is not None and each.kind in RESOLVERS]
            found = {each: self._problem(each) for each in code if each.attachments}
            self._problems = {kernel: problem for kernel, problem in found.items() if problem}
            if self._not_admitted is not None:
                self._not_admitted += self._problems.values()
        if self._allowed and any(
            kernel is not None and kernel.kind is KernelKind.triton for kernel in self._reader.kernels
        ):
            prepare_triton(self._device_types)

    def resolve(self, kernel: Kernel) -> ResolvedKernel | str:
        """The kernel, or a sentence that says why there is none."""
        named = f"{kernel.qualified_name} is a kernel of the kind {kernel.kind.name}"
        resolver = RESOLVERS.get(kernel.kind)
        if resolver is None:
            return f"{named}; this version does not replay them"
        if not kernel.attachments:
            return f"{named}, and its code is not in the capture"
        if not self._allowed:
            self._refused[kernel.kind] += 1
            roles = ", ".join(roles_of(self._reader, kernel))
            return f"{named}: its code is in the capture ({roles}), and runs only with {FLAG}"
        if kernel in self._problems:
            return self._problems[kernel]
        if self._not_admitted:
            return f"{named}, and no code of the capture runs while some of it is refused ({self._not_admitted[0]})"
        contents = contents_of(self._reader, kernel)
        return resolver(kernel, lambda: contents, self._device_types)

    def _problem(self, kernel: Kernel) -> str:
        """What is wrong with a kernel's attachments, or ""."""
        try:
            contents = contents_of(self._reader, kernel)
        except InvalidCapture as error:
            named = f"{kernel.qualified_name} is a kernel of the kind {kernel.kind.name}"
            return f"{named} with attachments that cannot be used: {error}"
        admit = ADMITTED.get(kernel.kind)
        return "" if admit is None else admit(kernel, lambda: contents)

    @property
    def advice(self) -> str:
        """What to do about the kernels that were refused for want of leave; "" if none was."""
        if not self._refused:
            return ""
        kinds = ", ".join(f"{kind.name} {count:,}" for kind, count in sorted(self._refused.items()))
        eager = (
            "; a capture with --compiled=eager has operators in place of what Inductor generated"
            if self._refused[KernelKind.inductor_cpp]
            else ""
        )
        return (
            f"kernels of the capture are code ({kinds}): if you trust whoever made it, replay with {FLAG} "
            f"(opreplay-dump --attachment=ID shows the code){eager}"
        )
