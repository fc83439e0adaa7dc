"""What serving engines say of a step in its annotation: how many requests, how many tokens, prefill or decode.

vLLM and SGLang name each step's profiler annotation after its batch. Imported captures keep these names as scopes.
Known forms:

    execute_32_context_1(sq512sk512sqsq262144sqsk262144)_generation_31(sq31sk9000sqsq31sqsk9000)     vLLM
    execute_context_1(512)_generation_31(31)                                                         vLLM, older
    execute_new_1_cached_31                                                                          vLLM, oldest
    step[DECODE bs=32]   step[EXTEND bs=2 toks=107]   step[MIXED bs=2]                               SGLang

In vLLM's detailed form `sq` is the sum of the query lengths, `sk` of the key lengths (the context), `sqsq` and `sqsk`
the sums of their products, each over the requests of that phase.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["prefill", "decode", "mixed", "idle"]

_DETAILED = re.compile(r"execute_(\d+)_context_(\d+)\(([^()]*)\)(?:_generation_(\d+)\(([^()]*)\))?\Z")
_SHORT = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)\Z")
_OLDEST = re.compile(r"execute_new_(\d+)_cached_(\d+)\Z")
_SGLANG = re.compile(r"step\[(\w+)((?:\s+\w+=\d+)*)\s*\]\Z")
_ENDLESS = re.compile(r"\d{19}")      # no batch has as many of anything
_SUMS = re.compile(r"(sqsq|sqsk|sksk|sq|sk)(\d+)")
_SGLANG_PHASES: dict[str, Phase] = {"DECODE": "decode", "EXTEND": "prefill", "PREFILL": "prefill", "MIXED": "mixed",
                                    "IDLE": "idle", "TARGET_VERIFY": "decode", "DRAFT_EXTEND": "prefill"}


@dataclass(frozen=True)
class Requests:
    """The requests of one phase. None: the annotation does not say. Token counts are sums over the requests."""

    requests: int | None = None
    query_tokens: int | None = None
    key_tokens: int | None = None
    query_squared: int | None = None
    query_times_key: int | None = None


@dataclass(frozen=True)
class Iteration:
    """One step of a serving engine. `text` is the annotation it was read from."""

    engine: str
    phase: Phase
    prefill: Requests
    decode: Requests
    text: str

    def row(self) -> dict[str, Any]:
        """As a record's annotation holds it: only what is known."""
        row: dict[str, Any] = {"engine": self.engine, "phase": self.phase}
        for name, group in (("prefill", self.prefill), ("decode", self.decode)):
            known = {key: value for key, value in vars(group).items() if value is not None}
            if known:
                row[name] = known
        return row


def parse_iteration(name: str) -> Iteration | None:
    """What an annotation says of a step; None where it is no step of a serving engine."""
    if _ENDLESS.search(name):
        return None
    found = _DETAILED.match(name)
    if found:
        prefill, decode = _sums(found[2], found[3]), _sums(found[4] or "0", found[5] or "")
        return Iteration("vllm", _phase(prefill, decode), prefill, decode, name)
    found = _SHORT.match(name)
    if found:
        prefill, decode = (Requests(int(found[i]), int(found[i + 1])) for i in (1, 3))
        return Iteration("vllm", _phase(prefill, decode), prefill, decode, name)
    found = _OLDEST.match(name)
    if found:
        # "Cached" requests were seen before: nearly always decoding, but a chunked prefill may go on.
        prefill, decode = Requests(int(found[1])), Requests(int(found[2]))
        return Iteration("vllm", _phase(prefill, decode), prefill, decode, name)
    found = _SGLANG.match(name)
    if found:
        return _sglang(found, name)
    return None


def _sglang(found: re.Match[str], name: str) -> Iteration | None:
    phase = _SGLANG_PHASES.get(found[1].upper())
    if phase is None:
        return None
    numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", found[2])}
    size, tokens = numbers.get("bs"), numbers.get("toks")
    # Every request of a plain decode step has one new token.
    one_each = found[1].upper() == "DECODE"
    batch = Requests(size, size if one_each and tokens is None else tokens)
    none = Requests(0, 0)
    if phase == "prefill":
        return Iteration("sglang", phase, batch, none, name)
    if phase == "decode":
        return Iteration("sglang", phase, none, batch, name)
    unknown = Requests() if phase == "mixed" else none
    return Iteration("sglang", phase, unknown, unknown, name)


def _sums(count: str, text: str) -> Requests:
    sums = {key: int(value) for key, value in _SUMS.findall(text)}
    return Requests(int(count), sums.get("sq"), sums.get("sk"), sums.get("sqsq"), sums.get("sqsk"))


def _phase(prefill: Requests, decode: Requests) -> Phase:
    if prefill.requests and decode.requests:
        return "mixed"
    if prefill.requests:
        return "prefill"
    return "decode" if decode.requests else "idle"
