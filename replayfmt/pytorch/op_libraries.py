"""Which library registers which operator namespace, and importing it if the user allows that.

Which module of an installed package registers an operator is found by reading the package's files. Imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.validation import text_of

_REGISTERS = re.compile(r"custom_op|triton_op|\bLibrary\(")
_NOT_SEARCHED = frozenset({"test", "tests", "testing", "__pycache__"})
_LONGEST_SOURCE = 4 << 20  # bytes
_LONGEST_EXTENSION = 4 << 30
_MOST_FILES = 50_000


def modules_registering(package: str, namespace: str, name: str) -> list[str]:
    """The modules of an installed package whose files register `namespace::name`, the likeliest first.

    None if the package is not installed, or is not a folder.
    """
    namespace, name = re.escape(namespace), re.escape(name)
    whole = re.compile(rf"""["']{namespace}::{name}["'(.]""")
    in_library = re.compile(rf"""(?:op_name\s*=|custom_op\(|triton_op\(|\.define\()\s*f?["']{name}["'(. ]""")
    named, local = [], []
    for module, text in _registering(package):
        if whole.search(text):
            named.append(module)
        elif in_library.search(text):
            local.append(module)
    extensions = [
        module
        for module, path in _files(package)
        if not path.name.endswith(".py") and _contains(path, (f"{name}(".encode(), namespace.encode()))
    ]
    return [*named, *local, *extensions]


@lru_cache(maxsize=8)
def _registering(package: str) -> tuple[tuple[str, str], ...]:
    """The sources of a package that register operators, with their modules."""
    found = []
    for module, path in _files(package):
        if not path.name.endswith(".py") or path.stat().st_size > _LONGEST_SOURCE:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if _REGISTERS.search(text):
            found.append((module, text))
    return tuple(found)


@lru_cache(maxsize=8)
def _files(package: str) -> tuple[tuple[str, Path], ...]:
    """Every module of a package with its file, in the order of their names."""
    found = PathFinder.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files: list[tuple[str, Path]] = []
    for folder in map(Path, folders):
        for path in _below(folder):
            suffix = next((each for each in (*EXTENSION_SUFFIXES, ".py") if path.name.endswith(each)), None)
            if suffix is None or len(files) >= _MOST_FILES:
                continue
            parts = [package, *path.relative_to(folder).parts]
            parts[-1] = parts[-1].removesuffix(suffix)
            if parts[-1] == "__init__":
                parts.pop()
            if parts[-1] != "__main__" and all(part.isidentifier() for part in parts):
                files.append((".".join(parts), path))
    return tuple(files)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in _NOT_SEARCHED)
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file():
                yield path


def _contains(path: Path, texts: tuple[bytes, ...]) -> bool:
    if not 0 < path.stat().st_size <= _LONGEST_EXTENSION:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(text) >= 0 for text in texts)


ENTRY_POINT_GROUP = "opreplay.op_libraries"

# Modules to import for a namespace, in order; all those that can be imported are.
KNOWN_LIBRARIES: dict[str, tuple[str, ...]] = {
    "prims": ("torch._prims",),
    "rngprims": ("torch._prims.rng_prims",),
    "inductor_prims": ("torch._inductor.inductor_prims",),
    "fsdp": ("torch.distributed.fsdp._fully_shard._fsdp_collectives",),
    "vllm": ("vllm.model_executor.custom_op", "vllm.attention.layer", "vllm.model_executor.layers.utils", "vllm"),
    "_C": ("vllm._C",),
    "_C_cache_ops": ("vllm._C",),
    "_C_custom_ar": ("vllm._C",),
    "_C_utils": ("vllm._C",),
    "_C_cuda_utils": ("vllm._C",),
    "_moe_C": ("vllm._moe_C",),
    "_rocm_C": ("vllm._rocm_C",),
    "_vllm_fa2_C": ("vllm.vllm_flash_attn",),
    "_vllm_fa3_C": ("vllm.vllm_flash_attn",),
    "aiter": ("aiter",),
    "sgl_kernel": ("sgl_kernel",),
    "sglang": ("sglang.srt.layers.attention", "sglang"),
    "flashinfer": ("flashinfer",),
    "flash_attn": ("flash_attn", "flash_attn.flash_attn_interface"),
    "flash_attn_3": ("flash_attn_interface",),
    "xformers": ("xformers.ops",),
    "xformers_flash": ("xformers.ops",),
    "xformers_flash3": ("xformers.ops",),
    "torchvision": ("torchvision",),
    "image": ("torchvision",),
    "torchaudio": ("torchaudio",),
    "torchao": ("torchao",),
    "fbgemm": ("fbgemm_gpu",),
    "quantized": ("torch.ao.quantization",),
    "quantized_decomposed": ("torch.ao.quantization.fx._decomposed",),
    "bitsandbytes": ("bitsandbytes",),
    "quanto": ("optimum.quanto",),
    "transformer_engine": ("transformer_engine.pytorch",),
    "tex": ("transformer_engine.pytorch",),
    "apex": ("apex",),
    "deepspeed": ("deepspeed",),
    "mamba_ssm": ("mamba_ssm",),
    "torch_scatter": ("torch_scatter",),
    "torch_sparse": ("torch_sparse",),
    "torch_cluster": ("torch_cluster",),
    "pyg": ("pyg_lib",),
    "tensorrt": ("torch_tensorrt",),
    "tensorrt_llm": ("tensorrt_llm",),
    "trtllm": ("tensorrt_llm",),
    "inductor": ("torch._inductor",),
    "onednn": ("torch",),
    "symm_mem": ("torch.distributed._symmetric_memory",),
    "_c10d_functional": ("torch.distributed._functional_collectives",),
}
# PyTorch's own modules: importing them needs no permission.
_OWN = "torch."


@dataclass(frozen=True)
class LoadedLibrary:
    """What became of a namespace's library. `modules` that are imported now; `problem` says why there are none."""

    modules: tuple[ModuleType, ...]
    problem: str = ""


class OpLibraries:
    """The table for one run: what is known, what the user registered, and what may be imported.

    `allowed` has namespaces, module names or packages (`vllm` admits `vllm._C` as well); `registered` maps namespaces
    to modules and comes before the known ones. Registering a library by flag or from Python also allows it. `own` says
    whether PyTorch's own optional modules need no leave: some of them write files and open sockets.
    """

    def __init__(
        self, allowed: Iterable[str] = (), registered: Mapping[str, Sequence[str]] | None = None, *, own: bool = True
    ) -> None:
        self._own = own
        self._allowed = set(allowed)
        self._registered = dict(_registered)
        for namespace, modules in (registered or {}).items():
            self._registered[namespace] = (*self._registered.get(namespace, ()), *modules)
        self._loaded: dict[str, LoadedLibrary] = {}

    def register(self, namespace: str, module: str) -> None:
        """Import `module` for operators of `namespace`, when one is needed."""
        self._registered[namespace] = (*self._registered.get(namespace, ()), module)
        self._loaded.pop(namespace, None)

    def modules_for(self, namespace: str) -> tuple[str, ...]:
        """The names of the modules that register a namespace, those of the user first; none: it is unknown."""
        found = (
            *self._registered.get(namespace, ()),
            *_from_entry_points().get(namespace, ()),
            *KNOWN_LIBRARIES.get(namespace, ()),
        )
        return tuple(dict.fromkeys(found))

    def admits(self, namespace: str, module: str) -> bool:
        if (
            module in self._registered.get(namespace, ())
            or module == "torch"
            or (self._own and module.startswith(_OWN))
        ):
            return True
        return bool(self._allowed & {namespace, module, module.partition(".")[0]})

    def callable(self, namespace: str, name: str) -> Callable[..., Any] | None:
        """A function that a library of a namespace has under an operator's name, where nothing is registered.

        Only a module that the user named for this very namespace is looked into: permission to import a library is
        permission to call its operators, not any of its functions (many can write files). And only functions that the
        library itself defines: what it imported from elsewhere is not its operators.
        """
        for module in self.load(namespace).modules:
            if module.__name__ in self._registered.get(namespace, ()) and _defines(module, name):
                found: Callable[..., Any] = getattr(module, name)
                return found
        return None

    def load(self, namespace: str) -> LoadedLibrary:
        """Import what registers a namespace, once. Failing to is not an error: the ops that need it are unsupported."""
        if namespace not in self._loaded:
            self._loaded[namespace] = self._load(namespace)
        return self._loaded[namespace]

    def provide(self, name: str, is_there: Callable[[], bool]) -> str:
        """Import what registers the operator `name`, as far as the user allows it: the modules known for its namespace,
        then those of the same packages whose files register it. `is_there` says whether it is registered by now.
        Returns "", or a phrase on why it is not there and what to do."""
        namespace, _separator, base = name.partition("::")
        loaded = self.load(namespace)
        if is_there():
            return ""
        tried = [module for module in self.modules_for(namespace) if self.admits(namespace, module)]
        if not tried:
            return f"and {loaded.problem}"
        problems = []
        for package in dict.fromkeys(module.partition(".")[0] for module in tried):
            for module in modules_registering(package, namespace, base) if package != "torch" else ():
                if not self.admits(namespace, module):
                    return (
                        f"and {module} registers it, which may not be imported; name it with "
                        f"--op-library {namespace}={module}"
                    )
                problems += [] if module in tried else _imported(module)[1]
                if is_there():
                    return ""
        why = "; ".join(filter(None, (loaded.problem, *problems))) or "no file of it registers that"
        imported = ", ".join(module.__name__ for module in loaded.modules)
        return (f"though {imported} is imported ({why})" if imported else f"and {why}") + self._by_name(loaded, name)

    def _by_name(self, loaded: LoadedLibrary, name: str) -> str:
        """What only naming a module for the namespace would help."""
        namespace, _separator, base = name.partition("::")
        for module in loaded.modules:
            if _defines(module, base):
                return (
                    f"; {module.__name__} has a function of that name, which is called in its place with "
                    f"--op-library {namespace}={module.__name__}"
                )
        return f"; if another module has it, name that with --op-library {namespace}=MODULE"

    def _load(self, namespace: str) -> LoadedLibrary:
        names = self.modules_for(namespace)
        if not names:
            return LoadedLibrary(
                (), f"no library is known that registers {namespace!r}; name it with --op-library {namespace}=MODULE"
            )
        admitted = [name for name in names if self.admits(namespace, name)]
        if not admitted:
            return LoadedLibrary(
                (),
                f"{names[0]} registers {namespace!r} and may not be imported; allow it with "
                f"--allow-import {names[0].partition('.')[0]}",
            )
        modules, problems = [], []
        for name in admitted:
            found, why = _imported(name)
            modules += found
            problems += why
        return LoadedLibrary(tuple(modules), "" if modules else "; ".join(problems))


def printing_aside() -> AbstractContextManager[object]:
    """What foreign code prints goes to stderr: what a tool prints on stdout is read by other programs."""
    return redirect_stdout(sys.stderr)


def _imported(name: str) -> tuple[list[ModuleType], list[str]]:
    """A module, or a sentence on why it cannot be imported; each in a list of its own."""
    try:
        with printing_aside():
            return [importlib.import_module(name)], []
    except Exception as error:  # a foreign library may fail in any way
        return [], [f"{name} cannot be imported: {type(error).__name__}: {error}".partition("\n")[0]]


def _defines(module: ModuleType, name: str) -> bool:
    """Whether a module has a function of that name that its own package defines."""
    value = getattr(module, name, None)
    origin = str(getattr(value, "__module__", ""))
    return (
        callable(value) and not inspect.isclass(value) and origin.partition(".")[0] == module.__name__.partition(".")[0]
    )


_entry_points: dict[str, tuple[str, ...]] | None = None


def _from_entry_points() -> dict[str, tuple[str, ...]]:
    """Namespaces that installed packages name: entry points `NAMESPACE = MODULE` of the group opreplay.op_libraries."""
    global _entry_points
    if _entry_points is None:
        found: dict[str, tuple[str, ...]] = {}
        for each in entry_points(group=ENTRY_POINT_GROUP):
            found[each.name] = (*found.get(each.name, ()), each.value)
        _entry_points = found
    return _entry_points


_registered: dict[str, tuple[str, ...]] = {}


def register_op_library(namespace: str, module: str) -> None:
    """Import `module` wherever this process needs an operator of `namespace`, in imports and in replays. Naming it here
    is the user's leave. Raises UsageError for what is not a name."""
    parse_op_library(f"{text_of('namespace', namespace)}={text_of('module', module)}")
    _registered[namespace] = tuple(dict.fromkeys((*_registered.get(namespace, ()), module)))


def parse_op_library(text: str) -> tuple[str, str]:
    """(namespace, module) of `NAMESPACE=MODULE`. Raises UsageError."""
    namespace, separator, module = text.partition("=")
    if not separator or not namespace.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"--op-library={text}: expected NAMESPACE=MODULE, such as mylib=mylib.ops")
    return namespace, module
