"""Operators of serving engines (vLLM, SGLang, FlashInfer, AITER) as compositions of PyTorch's, without the engine.

Each composition has the shapes and dtypes of the original and computes what that is defined as. Lengths of sequences
are content, which no trace has: attention reads as many keys as the longest sequence may have, and masks those beyond a
sequence's end. Where the caches are no arguments (vLLM's own attention), the annotation of the engine's step says how
many keys there are. Attention with slopes stays as it is.

Each module's RULES have a composition and the operators that it replaces; operator_schemas.txt has their schemas.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from . import (
    engine_adapters,
    engine_attention,
    engine_experts,
    engine_layers,
    engine_sparse,
    engine_states,
    engine_weights,
)

# FlashInfer names an operator after what it is compiled for: dtypes, widths, and embeddings of positions, here none.
_COMPILED = re.compile(
    r"flashinfer::(batch_decode|batch_prefill|single_prefill)_with_kv_cache_\w*posenc_0_\w*?(_ragged|_paged|)_run\Z"
)


def engine_name(name: str) -> str:
    """The name in these tables of an operator that is named after what it is compiled for."""
    found = _COMPILED.match(name)
    return f"flashinfer::{found[1]}{found[2]}" if found else name


def _schemas() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in files(__package__).joinpath("operator_schemas.txt").read_text("ascii").splitlines():
        if line and not line.startswith("#"):
            name = line.partition("(")[0]
            found[name] = (*found.get(name, ()), line)
    return found


SCHEMAS = _schemas()
ENGINES: dict[str, Any] = {
    name: rule
    for module in (
        engine_layers,
        engine_attention,
        engine_experts,
        engine_weights,
        engine_sparse,
        engine_states,
        engine_adapters,
    )
    for rule, names in module.RULES
    for name in names.split()
}
