"""A Triton kernel as a capture holds it: a schema, its source, and metadata that say how its launches are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .accesses import Accesses
from .compiled import BINARIES, STAGES, StoredBinary, attached_stages, compiled_accesses, compiled_metadata
from .declarations import declaration_of, source_without_bodies
from .forms import LaunchForm, NotRepresentable
from .sources import StandaloneSource

VERSION = 1
INTERPRETER = "interpreter"
INDUCTOR = "inductor"  # compiled it, and kept the binary for itself
_ARITHMETIC = ("enable_fp_fusion", "default_dot_input_precision", "sanitize_overflow", "debug")


@dataclass(frozen=True)
class KernelCode:
    """A kernel that is written to a capture. `identity`: those of its metadata that its variant is made of; `contents`:
    role, name and content of each other attachment. `read`: the parameters through which it may read, None if its
    intermediate code does not tell. `written`: the tensor arguments that it may write, `assumed`: those of them of
    which nothing tells that it does; `found_in` what tells of the others (`ir`, `source`). `changed`: those of the
    assumed ones whose content a launch changed, None if it was not compared."""

    name: str
    identity: Mapping[str, Any]
    details: Mapping[str, Any]
    form: LaunchForm
    contents: tuple[tuple[str, str, bytes], ...]
    read: frozenset[str] | None
    written: frozenset[str]
    assumed: frozenset[str]
    found_in: str
    changed: frozenset[str] | None = None

    @classmethod
    def of_launch(
        cls,
        name: str,
        source: StandaloneSource,
        form: LaunchForm,
        accesses: Accesses,
        configuration: str,
        compiled: Any = None,
        *,
        target: str = INTERPRETER,
        binary: bool = True,
    ) -> KernelCode:
        """The kernel of a launch. `configuration`: what an autotuner chose, "" if none did. `compiled`: what Triton
        compiled for it; without it, `target` says what ran it. `binary`: whether Triton launches its binary for such
        arguments. Raises NotRepresentable."""
        import triton

        identity: dict[str, Any] = {
            "kind": "triton",
            "version": VERSION,
            "function": source.name,
            "parameters": form.parameters,
            "constexprs": form.constexprs,
            "grid": form.grid,
            "options": form.options,
            "dtypes": form.dtypes,
            "source_sha256": hashlib.sha256(source.text.encode()).hexdigest(),
        }
        details: dict[str, Any] = {}
        written, stored, found_in = accesses.written, accesses.stored, "source"
        makes_pointers = accesses.makes_pointers or bool(accesses.casts_to & form.pointers)
        stages: list[tuple[str, bytes]] = []
        read: frozenset[str] | None = None
        if compiled is None:
            details["target"] = target
        else:
            identity |= compiled_metadata(compiled, source.name_of)
            stages = [each for each in attached_stages(compiled) if binary or each[0] not in BINARIES]
            details["declaration"] = declaration_of(source, form.functions)
            found = compiled_accesses(compiled)
            if found is not None:
                (written, stored, read, makes_pointers), found_in = found, "ir"
        if makes_pointers:
            raise NotRepresentable("it turns integers into pointers, so that what it reads and writes is not known")
        details["triton"] = triton.__version__
        if configuration:
            details["configuration"] = configuration
        tensors = form.tensors
        may = frozenset(each for each in tensors if written is None or form.owner[each] in written)
        return cls(
            name,
            identity,
            details,
            form.without_values(),
            (
                ("source", f"{name}.py", source.text.encode()),
                *((role, f"{name}.{role}", content) for role, content in stages),
            ),
            read,
            may,
            frozenset(each for each in may if form.owner[each] not in stored),
            found_in,
        )

    def found_to_change(self, changed: frozenset[str]) -> KernelCode:
        """The kernel of a launch that changed the content of these of the assumed arguments, and of no others."""
        return replace(self, written=self.written - self.assumed | changed, changed=changed)

    @property
    def writes(self) -> str:
        """How it is known what it writes."""
        if not self.assumed:
            return self.found_in
        return "assumed" if self.changed is None else "compared"

    @property
    def schema(self) -> str:
        return self.form.schema(self.name, _variant({**self._identity, "types": self.form.types}), self.written)

    @property
    def attached(self) -> tuple[tuple[str, str, bytes], ...]:
        """Role, name and content of each attachment."""
        source, *stages = self.contents
        metadata = {**self._identity, **self.details, "writes": self.writes}
        return (source, ("metadata", f"{self.name}.json", json.dumps(metadata, indent=1).encode()), *stages)

    @property
    def _identity(self) -> Mapping[str, Any]:
        return self.identity if self.changed is None else {**self.identity, "changed": sorted(self.changed)}


@dataclass(frozen=True)
class StoredKernel:
    """A kernel as it was read from a capture. Nothing of it was run. `source`: None if it was left out. `compiled`: all
    that Triton said of what it compiled, options among it."""

    source: str | None
    function: str
    parameters: Mapping[str, Any]
    grid: str
    options: Mapping[str, str]
    dtypes: Mapping[str, str]
    target: Any
    triton: str
    binary: StoredBinary | None
    compiled: Mapping[str, Any]
    declaration: Any

    def arithmetic_options(self, target: Any, known: Iterable[str]) -> dict[str, Any]:
        """How it computes, where its source is compiled for a target: options that it was compiled with, of those that
        the target's compiler knows, and that Triton otherwise chooses by its version and the environment."""
        if not isinstance(self.target, dict) or self.target.get("backend") != target.backend:
            return {}
        names = [name for name in _ARITHMETIC if name in known and name not in self.options]
        return {name: self.compiled[name] for name in names if isinstance(self.compiled.get(name), bool | str)}

    @property
    def module(self) -> str:
        """The text of a module with the kernel: its source, else one from which its binary can be launched. Raises
        ValueError if there is neither."""
        if self.source is not None:
            return self.source
        if self.binary is None or self.declaration is None:
            raise ValueError("the capture has no source of it" + (", and no declaration" if self.binary else ""))
        return source_without_bodies(self.declaration)

    @classmethod
    def read(cls, contents: Mapping[str, bytes]) -> StoredKernel:
        """From its attachments, by role. Raises ValueError that says what is wrong with them."""
        if "metadata" not in contents:
            raise ValueError("the capture has no metadata of it")
        try:
            metadata = json.loads(contents["metadata"])
            source = contents["source"].decode() if "source" in contents else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its source or its metadata cannot be read ({error})") from None
        if not isinstance(metadata, dict) or metadata.get("kind") != "triton" or metadata.get("version") != VERSION:
            raise ValueError(f"its metadata are not those of a Triton kernel of version {VERSION}")
        if source is not None and hashlib.sha256(source.encode()).hexdigest() != metadata.get("source_sha256"):
            raise ValueError("its source does not match the hash in its metadata")
        kinds = {"function": str, "parameters": dict, "grid": str, "options": dict, "dtypes": dict, "triton": str}
        for key, kind in kinds.items():
            if not isinstance(metadata.get(key), kind):
                raise ValueError(f"its metadata have no {key}")
        for key in ("options", "dtypes"):
            if not all(isinstance(value, str) for value in metadata[key].values()):
                raise ValueError(f"the {key} in its metadata are not names")
        stages = {role: content for role, content in contents.items() if role in STAGES}
        return cls(
            source,
            target=metadata.get("target"),
            binary=StoredBinary(metadata, stages) if any(role in stages for role in BINARIES) else None,
            compiled=compiled if isinstance(compiled := metadata.get("compiled"), dict) else {},
            declaration=metadata.get("declaration"),
            **{key: metadata[key] for key in kinds},
        )


def _variant(identity: Mapping[str, Any]) -> str:
    """The overload of a kernel: the beginning of its identity's SHA-256, after a letter."""
    return "v" + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
