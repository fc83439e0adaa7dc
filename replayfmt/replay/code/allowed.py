"""The gate to code in captures: kernels that are no operators run machine code or Python source from the file.

Without `allow_code` such a kernel is a finding, and no byte of its attachments is looked at. With it they are read and
verified as a whole, and only then given to the resolver of the kernel's kind. What that makes runs nothing of them
before it is loaded, for which the plan waits until nothing speaks against the replay.
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
from .inductor_cpp import resolve_inductor_cpp
from .triton_kernels import prepare_triton, resolve_triton

FLAG = "--allow-code"
# What makes a kernel of its attachments, by role (replayfmt.format.attachments says which roles are given), for a
# replay on these types of devices; or a sentence that says why it cannot, beginning with the kernel's name. It checks
# that they go together; the kernel compiles, loads and imports them when it is loaded. It is called only where the user
# allowed that.
Resolver = Callable[[Kernel, Callable[[], Mapping[str, bytes]], frozenset[str]], ResolvedKernel | str]

RESOLVERS: dict[KernelKind, Resolver] = {
    KernelKind.triton: resolve_triton,
    KernelKind.inductor_cpp: resolve_inductor_cpp,
}


class AllowedCode:
    """Whether code of one capture may run. `device_types` are those that the replay uses."""

    def __init__(self, reader: CaptureReader, allowed: bool, device_types: frozenset[str]) -> None:
        self._reader, self._allowed, self._device_types = reader, allowed, device_types
        self._refused: Counter[KernelKind] = Counter()

    def prepare(self) -> None:
        """Before anything of the user's is imported: have libraries imported as the kernels need them."""
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
        try:
            contents = contents_of(self._reader, kernel)
        except InvalidCapture as error:
            return f"{named} with attachments that cannot be used: {error}"
        return resolver(kernel, lambda: contents, self._device_types)

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
