"""What a run of a case came to, as facts that can be compared bit for bit, and how two of them differ.

A fact is what one place of the results (`result[0]`, `input[1].grad`) is in one aspect (`dtype`, `strides`, `values`).
Values are bytes: NaNs with other payloads and zeros of the other sign are differences, and are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Fact = tuple[str, str]  # place and aspect
Facts = dict[Fact, Any]

_MOST_NODES = 60  # of a graph of gradients


@dataclass(frozen=True)
class Difference:
    """One fact that is another one, or that only one of two runs has. `kind`: the aspect; of values, what of them."""

    place: str
    kind: str
    without: str
    under: str


@dataclass(frozen=True)
class Bits:
    """The bytes of a tensor's elements, in order."""

    dtype: torch.dtype
    content: bytes

    def __repr__(self) -> str:
        shown = self.elements()[:6].tolist() if self.content else []
        return f"{len(self.content)} bytes {shown}"

    def elements(self) -> torch.Tensor:
        if not self.content:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype)


def facts_of(places: Mapping[str, Any]) -> Facts:
    """The facts of named values. Nothing of the program may still run, and nothing may record: this runs operators."""
    facts: Facts = {}
    memory: dict[int, str] = {}
    for place, value in places.items():
        _add(facts, place, value, memory)
    return facts


def _add(facts: Facts, place: str, value: Any, memory: dict[int, str]) -> None:
    facts[place, "type"] = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        _add_tensor(facts, place, value, memory)
    elif isinstance(value, torch.UntypedStorage):
        facts[place, "values"] = Bits(torch.uint8, bytes(value.tolist()))
    elif isinstance(value, (str, bytes)):
        facts[place, "value"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(facts, f"{place}[{key!r}]", item, memory)
    elif isinstance(value, Sequence):
        facts[place, "length"] = len(value)
        for index, item in enumerate(value):
            _add(facts, f"{place}[{index}]", item, memory)
    elif isinstance(value, float):
        facts[place, "values"] = Bits(torch.float64, _bytes_of(torch.tensor(value, dtype=torch.float64)))
    else:
        facts[place, "value"] = repr(value)


def _add_tensor(facts: Facts, place: str, tensor: torch.Tensor, memory: dict[int, str]) -> None:
    flags = {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "layout": tensor.layout,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "inference": tensor.is_inference(),
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
        "grad_fn": type(tensor.grad_fn).__name__,
        "graph": _graph_of(tensor),
        "version": None if tensor.is_inference() else tensor._version,
    }
    if tensor.layout is torch.strided:
        flags["strides"] = tuple(tensor.stride()) if not tensor.is_nested else None
        flags["offset"] = tensor.storage_offset()
        # Which of the values shares whose memory, not where that is.
        flags["memory"] = memory.setdefault(tensor.untyped_storage()._cdata, place)
    facts.update({(place, aspect): str(value) for aspect, value in flags.items()})
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        plain = tensor.detach()
    for name, part in _parts(plain):
        facts[place + name, "values"] = Bits(part.dtype, _bytes_of(part))
    if tensor.is_leaf and not tensor.is_inference() and tensor.grad is not None:
        _add(facts, f"{place}.grad", tensor.grad, memory)


def _parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The strided tensors that hold a tensor's content."""
    if tensor.layout is torch.sparse_coo:
        return [(".indices", tensor._indices()), (".values", tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [(".rows", tensor.crow_indices()), (".columns", tensor.col_indices()), (".values", tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [(".columns", tensor.ccol_indices()), (".rows", tensor.row_indices()), (".values", tensor.values())]
    if tensor.is_nested:
        return [(f".unbind[{index}]", part) for index, part in enumerate(tensor.unbind())]
    if tensor.is_quantized:
        return [(".integers", tensor.int_repr())]
    if tensor.layout is not torch.strided:
        return [(".dense", tensor.to_dense())]
    return [("", tensor)]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _graph_of(tensor: torch.Tensor) -> str:
    """The nodes of a tensor's graph of gradients, the nearest first."""
    names: list[str] = []
    waiting = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting and len(names) < _MOST_NODES:
        node = waiting.pop(0)
        names.append("-" if node is None else type(node).__name__)
        if node is not None:
            waiting += [other for other, _ in node.next_functions]
    return " ".join(names)


def differences(without: Facts, under: Facts) -> list[Difference]:
    """How the facts of a run under something differ from those of a run without it."""
    found = []
    for fact in dict.fromkeys((*without, *under)):
        one, other = without.get(fact, "nothing"), under.get(fact, "nothing")
        if one != other:
            place, aspect = fact
            kind = aspect
            if fact not in without or fact not in under:
                if aspect != "type":
                    continue  # the value as such is missing, or is one of another type
                kind = "presence"
            if isinstance(one, Bits) and isinstance(other, Bits):
                if one.dtype != other.dtype or len(one.content) != len(other.content):
                    continue  # the dtype or the shape says so
                kind = _kind_of_values(one, other)
            found.append(Difference(place, kind, _shown(one), _shown(other)))
    return found


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _kind_of_values(one: Bits, other: Bits) -> str:
    """What of two tensors' elements differs: only the sign of zeros, the payload of NaNs, the last bits, or more."""
    a, b = one.elements(), other.elements()
    if not (a.is_floating_point() or a.is_complex()):
        return "values"
    if a.is_complex():
        a, b = torch.view_as_real(a).reshape(-1), torch.view_as_real(b).reshape(-1)
    precision = torch.finfo(a.dtype).eps
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return "values"
    a, b = a[~a.isnan()], b[~b.isnan()]
    if torch.equal(a, b):
        return "sign of zero" if not torch.equal(a.signbit(), b.signbit()) else "payload of NaN"
    finite = a.isfinite()
    if torch.equal(finite, b.isfinite()) and torch.equal(a[~finite], b[~finite]):
        a, b = a[finite], b[finite]
        if (a - b).abs().max() <= 64 * precision * max(1.0, a.abs().max().item()):
            return "rounding"
    return "values"
