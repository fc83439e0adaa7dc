"""Annotations of serving engines' steps: the numbers of requests and tokens, prefill or decode.

vLLM, SGLang and ATOM name each step's profiler annotation after its batch. Imported captures keep these names as
scopes. Known forms:

    execute_32_context_1(sq512sk512sqsq262144sqsk262144)_generation_31(sq31sk9000sqsq31sqsk9000)     vLLM
    execute_context_1(512)_generation_31(31)                                                         vLLM, older
    execute_new_1_cached_31                                                                          vLLM, oldest
    step[DECODE bs=32]   step[EXTEND bs=2 toks=107]   step[MIXED bs=2]                               SGLang
    step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 c_sqsk=40 g_sq=1 g_sk=12 g_sqsq=1 g_sqsk=12]     SGLang, detailed
    prefill[bs=2 tok=14721 ctx=[7803, 6918]]   decode[bs=117/128 tok=117 d=117]                      ATOM
    decode[bs=128 tok=384 p=2 d=126 sqsq=132612 sqsk=1114112 sk=258048]                              ATOM, detailed

`sq` is the sum of the query lengths, `sk` of the key lengths (the context), `sqsq` and `sqsk` the sums of their
products, each over the requests of a phase: `c` for context or prefill, `g` for generation or decode. A second number
in the parentheses of vLLM's short form, as in `execute_context_1(888_788544)_generation_0(0)`, is a sum of products,
but not said of which: it is not taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["prefill", "decode", "mixed", "idle"]

_DETAILED = re.compile(r"execute_(\d+)_context_(\d+)\(([^()]*)\)(?:_generation_(\d+)\(([^()]*)\))?\Z")
_SHORT = re.compile(r"execute_context_(\d+)\((\d+)(?:_\d+)?\)_generation_(\d+)\((\d+)(?:_\d+)?\)\Z")
_OLDEST = re.compile(r"execute_new_(\d+)_cached_(\d+)\Z")
_SGLANG = re.compile(r"step\[(\w+)((?:\s+\w+=\d+)*)\s*\]\Z")
_ATOM = re.compile(r"(prefill|decode|eager_decode)\[(bs=\d+[^\[\]]*(?:\[[\d, ]*\][^\[\]]*)?)\]\Z")
_FIELD = re.compile(r"(?<!\w)(\w+)=(\[[\d, ]*\](?:\.\.\.\+\d+)?|\d+)")
_ENDLESS = re.compile(r"\d{19}")  # no batch has as many of anything
_SUMS = re.compile(r"(sqsq|sqsk|sksk|sq|sk)(\d+)")
_SGLANG_PHASES: dict[str, Phase] = {
    "DECODE": "decode",
    "EXTEND": "prefill",
    "PREFILL": "prefill",
    "MIXED": "mixed",
    "IDLE": "idle",
    "TARGET_VERIFY": "decode",
    "DRAFT_EXTEND": "prefill",
}


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


def iteration_in(path: str) -> Iteration | None:
    """What the outermost scope of a path says that describes a batch: one inside it speaks of a part of the same
    step, or of all of it in fewer words."""
    parts = path.split("/")
    for place, name in enumerate(parts):
        # A name with a slash in it: decode[bs=117/128 tok=117 d=117]
        whole = "/".join(parts[place : place + 2]) if "[" in name and "]" not in name else name
        found = parse_iteration(whole)
        if found is not None:
            return found
    return None


def parse_iteration(name: str) -> Iteration | None:
    """What an annotation says of a step; None if it is not a step of a serving engine."""
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
    found = _ATOM.match(name)
    return _atom(found, name) if found else None


def _sglang(found: re.Match[str], name: str) -> Iteration | None:
    phase = _SGLANG_PHASES.get(found[1].upper())
    if phase is None:
        return None
    numbers = {key: int(value) for key, value in re.findall(r"(?<!\w)(\w+)=(\d+)", found[2])}
    size, tokens = numbers.get("bs"), numbers.get("toks")
    # Every request of a plain decode step has one new token.
    if tokens is None and found[1].upper() == "DECODE":
        tokens = size

    def group(key: str, own: Phase) -> Requests:
        count, total = (size, tokens) if phase == own else (numbers.get(key), None) if phase == "mixed" else (0, 0)
        return Requests(
            count,
            numbers.get(f"{key}_sq", total),
            numbers.get(f"{key}_sk"),
            numbers.get(f"{key}_sqsq"),
            numbers.get(f"{key}_sqsk"),
        )

    return Iteration("sglang", phase, group("c", "prefill"), group("g", "decode"), name)


def _atom(found: re.Match[str], name: str) -> Iteration:
    """A step that is called `decode` may prefill, too: `p` requests do then, `d` decode, with the sums over both."""
    fields = dict(_FIELD.findall(found[2]))
    numbers = {key: int(value) for key, value in fields.items() if value.isdigit()}
    size, tokens = numbers["bs"], numbers.get("tok")  # of bs=117/128 the first: the rest pads a graph
    contexts, listed = numbers.get("sk"), [int(each) for each in re.findall(r"\d+", fields.get("ctx", ""))]
    if contexts is None and len(listed) == size and "..." not in fields["ctx"]:
        contexts = sum(listed)
    together = Requests(size, tokens, contexts, numbers.get("sqsq"), numbers.get("sqsk"))
    none = Requests(0, 0)
    if found[1] == "prefill":
        return Iteration("atom", "prefill", together, none, name)
    starting, going = numbers.get("p", 0), numbers.get("d", size)
    if not starting:
        return Iteration("atom", _phase(none, together), none, together, name)
    decoded = going * (1 + numbers.get("spec", 0))  # a token each, and those that were speculated
    left = None if tokens is None or tokens - decoded < starting else tokens - decoded
    return Iteration(
        "atom",
        "mixed" if going else "prefill",
        Requests(starting, left),
        Requests(going, None if left is None else decoded),
        name,
    )


def _sums(count: str, text: str) -> Requests:
    sums = {key: int(value) for key, value in _SUMS.findall(text)}
    return Requests(int(count), sums.get("sq"), sums.get("sk"), sums.get("sqsq"), sums.get("sqsk"))


def _phase(prefill: Requests, decode: Requests) -> Phase:
    if prefill.requests and decode.requests:
        return "mixed"
    if prefill.requests:
        return "prefill"
    return "decode" if decode.requests else "idle"
