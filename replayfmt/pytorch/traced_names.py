"""Traces' names of operators, and replacements for strings and numbers that they lack: built-in tables, and the user's.

A trace may name an operator otherwise than the library that is here, the profiler drops the strings that an operator
was given, and older ones its numbers. What is put in their place may be wrong: every use of a default, and of an alias
that is another operator's name, is a warning of the import.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from replayfmt.errors import UsageError
from replayfmt.format.validation import text_of

ANY = "*"  # in place of an operator: any that has an argument of that name
_OPERATOR = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*::[A-Za-z_]\w*\Z")
_DEFAULT = re.compile(r"(?P<operator>\*|[^=]*?::[A-Za-z_]\w*)\.(?P<argument>[A-Za-z_]\w*)=(?P<value>.*)\Z")

_Key = TypeVar("_Key", str, tuple[str, str])

# Names that traces print, and the operators they mean where nothing has the printed name.
ALIASES: dict[str, str] = {
    "detach": "aten::detach",
    "detach_": "aten::detach_",
    "aten::layer_norm_cuda": "aten::native_layer_norm",
    "aten::_native_batch_norm": "aten::native_batch_norm",
    "FlashAttnFunc": "flash_attn::_flash_attn_forward",
    "FlashAttnFuncBackward": "flash_attn::_flash_attn_backward",
    "FlashAttnVarlenFunc": "flash_attn::_flash_attn_varlen_forward",
    "FlashAttnVarlenFuncBackward": "flash_attn::_flash_attn_varlen_backward",
    "aten::_cat": "aten::cat",
    "aten::_s_where": "aten::where",
    "aten::thnn_conv2d_forward": "aten::_slow_conv2d_forward",
    "aten::thnn_conv2d_backward": "aten::_slow_conv2d_backward",
    "torchvision::_new_nms": "torchvision::nms",
    "fbgemm::batched_unary_embeddings": "fbgemm::batched_unary_embeddings_forward",
    # vLLM changed the spelling.
    "_rocm_C::wvSplitK": "_rocm_C::wvSpltK",
    "_rocm_C::wvSpltK": "_rocm_C::wvSplitK",
}

_CONVOLUTION = "PyTorch 1.11 replaced it with aten::convolution_backward, which takes the operator's input as well"
# Operators of PyTorch's that are gone, and what has come of them where that takes other arguments.
REMOVED: dict[str, str] = {
    **{
        f"aten::{library}_{kind}_backward{part}": _CONVOLUTION
        for library in ("cudnn", "miopen", "mkldnn", "slow", "thnn")
        for kind in ("convolution", "convolution_transpose", "depthwise_convolution", "conv_transpose2d", "conv3d")
        for part in ("", "_input", "_weight", "_bias", "_weights")
    },
    **dict.fromkeys(
        (f"aten::{name}" for name in ("thnn_conv_depthwise2d_forward", "thnn_conv_depthwise2d_backward")),
        "PyTorch 1.10 replaced it with aten::_conv_depthwise2d and aten::convolution_backward",
    ),
    "aten::_convolution_nogroup": "PyTorch 1.10 replaced it with aten::convolution",
    "aten::symeig": "PyTorch 2.0 replaced it with aten::linalg_eigh",
    "aten::eig": "PyTorch 1.11 replaced it with aten::linalg_eig",
    "aten::solve": "PyTorch 1.11 replaced it with aten::linalg_solve, whose arguments are the other way round",
    "aten::lstsq": "PyTorch 1.11 replaced it with aten::linalg_lstsq, whose arguments are the other way round",
    "aten::matrix_rank": "PyTorch 1.11 replaced it with aten::linalg_matrix_rank",
    **dict.fromkeys(
        (f"aten::{name}" for name in ("fft", "ifft", "rfft", "irfft", "_fft_with_size")),
        "PyTorch 1.8 replaced it with the aten::fft_ operators on complex tensors",
    ),
}

# The strings that are passed most often, by operator and argument. Of ANY: only where the schema has no default.
STRING_DEFAULTS: dict[tuple[str, str], str] = {
    (ANY, "kv_cache_dtype"): "auto",
    ("_rocm_C::paged_attention", "mfma_type"): "f16",
    ("aten::div", "rounding_mode"): "floor",
    ("aten::scatter_reduce", "reduce"): "sum",
    ("aten::scatter_reduce_", "reduce"): "sum",
    ("aten::index_reduce", "reduce"): "mean",
    ("aten::index_reduce_", "reduce"): "mean",
    ("aten::segment_reduce", "reduce"): "sum",
}


class Guess(str):
    """A sentence on something assumed that may well be wrong: the import warns of it."""

    __slots__ = ()


class StringDefault(NamedTuple):
    """What stands for a string that a trace dropped. `by_name`: only where the operator's schema has no default."""

    value: str
    source: str
    by_name: bool


@dataclass
class _Given:
    """An entry of the user's, and whether anything needed it."""

    value: str
    used: bool = False


class TracedNames:
    """The tables for one import, the user's entries first."""

    def __init__(
        self,
        aliases: Mapping[str, str] | None = None,
        string_defaults: Mapping[tuple[str, str], str] | None = None,
        number_defaults: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """`aliases`: from a traced name to an operator's. `string_defaults` and `number_defaults`: by operator (ANY: of
        whatever name) and argument; numbers and lists of them as text."""
        self._aliases = {name: _Given(operator) for name, operator in (_aliases | dict(aliases or {})).items()}
        self._strings = {key: _Given(value) for key, value in (_strings | dict(string_defaults or {})).items()}
        self._numbers = {key: _Given(value) for key, value in dict(number_defaults or {}).items()}

    def meant(self, name: str) -> tuple[str, ...]:
        """The names under which to look for a traced one, in order."""
        given = self._aliases.get(name)
        if given is not None:
            given.used = True
            return (given.value,)
        known = ALIASES.get(name)
        return (name,) if known is None else (name, known) if "::" in name else (known,)

    def renamed(self, name: str) -> bool:
        """Whether the user says which operator a traced name means."""
        return name in self._aliases

    def alias_sentence(self, name: str, operator: str) -> str:
        """The note on a call that is assumed to be another operator than the traced one."""
        if name in self._aliases:
            return Guess(f"{name} is {operator}, as you said")
        text = f"{name} is {operator}, by the table of aliases"
        return text if operator == f"aten::{name}" else Guess(text)  # autograd names without a namespace

    def string(self, operator: str, argument: str) -> StringDefault | None:
        """What stands for a string argument that the trace does not have; None if nothing is known."""
        given = _said(self._strings, operator, argument)
        if given is not None:
            return StringDefault(given, "as you said", False)
        known = STRING_DEFAULTS.get((operator, argument))
        if known is not None:
            return StringDefault(known, "the table of string defaults has this", False)
        known = STRING_DEFAULTS.get((ANY, argument))
        return (
            None
            if known is None
            else StringDefault(known, "the table of string defaults has this for arguments of that name", True)
        )

    def number(self, operator: str, argument: str) -> str | None:
        """What the user says that a number, or a list of them, was which the trace does not have."""
        return _said(self._numbers, operator, argument)

    def unused(self) -> list[str]:
        """A sentence for each entry of the user's that nothing needed."""
        found = [
            f"--op-alias {name}={given.value}: nothing in the trace has that name"
            for name, given in self._aliases.items()
            if not given.used and name not in _aliases
        ]
        return (
            found
            + [
                f"--string-default {operator}.{argument}={given.value}: no call lacks that string"
                for (operator, argument), given in self._strings.items()
                if not given.used and (operator, argument) not in _strings
            ]
            + [
                f"--number-default {operator}.{argument}={given.value}: no call lacks that number"
                for (operator, argument), given in self._numbers.items()
                if not given.used
            ]
        )


def _said(table: Mapping[tuple[str, str], _Given], operator: str, argument: str) -> str | None:
    """The user's entry for an operator's argument, or for that argument of any operator."""
    given = table.get((operator, argument)) or table.get((ANY, argument))
    if given is None:
        return None
    given.used = True
    return given.value


_aliases: dict[str, str] = {}
_strings: dict[tuple[str, str], str] = {}


def register_op_alias(traced: str, operator: str) -> None:
    """In every import of this process, take `operator` for what traces call `traced`. Raises UsageError for what is not
    an operator name."""
    _aliases.update([parse_op_alias(f"{text_of('traced', traced)}={text_of('operator', operator)}")])


def register_string_default(operator: str, argument: str, value: str) -> None:
    """In every import of this process, take `value` where a trace dropped a string argument of `operator` ("*": any
    that has an argument of that name). Raises UsageError for what is not a name."""
    given = (text_of("operator", operator), text_of("argument", argument), text_of("value", value))
    _strings.update([parse_string_default("{}.{}={}".format(*given))])


def parse_op_alias(text: str) -> tuple[str, str]:
    """(traced name, operator) of `TRACED=NAMESPACE::NAME`. Raises UsageError."""
    traced, separator, operator = text.rpartition("=")
    if not separator or not traced or traced == operator or not _OPERATOR.match(operator):
        raise UsageError(f"--op-alias={text}: expected TRACED=OPERATOR, such as _rocm_C::wvSplitK=_rocm_C::wvSpltK")
    return traced, operator


def parse_string_default(text: str) -> tuple[tuple[str, str], str]:
    """((operator, argument), value) of `OPERATOR.ARGUMENT=VALUE`. Raises UsageError."""
    found = _DEFAULT.match(text)
    if found is None or not (found["operator"] == ANY or _OPERATOR.match(found["operator"])):
        raise UsageError(
            f"--string-default={text}: expected OPERATOR.ARGUMENT=VALUE, such as "
            "_C::paged_attention_v1.kv_cache_dtype=fp8, or *.kv_cache_dtype=fp8 for any operator"
        )
    return (found["operator"], found["argument"]), found["value"]


_SEPARATORS = re.compile(r"[\[\](),\s]+")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?\Z|[+-]?(inf|nan)\Z|(true|false)\Z", re.IGNORECASE)


def parse_number_default(text: str) -> tuple[tuple[str, str], str]:
    """((operator, argument), value) of `OPERATOR.ARGUMENT=VALUE`, a number or a list of them. Raises UsageError."""
    found = _DEFAULT.match(text)
    words = _SEPARATORS.split(found["value"].strip("[]() ")) if found is not None else [""]
    if (
        found is None
        or not (found["operator"] == ANY or _OPERATOR.match(found["operator"]))
        or not all(_NUMBER.match(word) for word in words)
    ):
        raise UsageError(
            f"--number-default={text}: expected OPERATOR.ARGUMENT=NUMBER, such as aten::clamp.min=0 or "
            "aten::view.size=[12,-1], or *.eps=1e-5 for any operator"
        )
    return (found["operator"], found["argument"]), found["value"]


def parsed(
    aliases: Iterable[str] = (), string_defaults: Iterable[str] = (), number_defaults: Iterable[str] = ()
) -> TracedNames:
    """The tables with a command line's entries. Raises UsageError if one is wrong, or given twice."""
    return TracedNames(
        _table("--op-alias", map(parse_op_alias, aliases)),
        _table("--string-default", map(parse_string_default, string_defaults)),
        _table("--number-default", map(parse_number_default, number_defaults)),
    )


def _table(flag: str, entries: Iterable[tuple[_Key, str]]) -> dict[_Key, str]:
    table: dict[_Key, str] = {}
    for key, value in entries:
        if table.setdefault(key, value) != value:
            name = key if isinstance(key, str) else ".".join(map(str, key))
            raise UsageError(f"{flag}: {name} is given twice, as {table[key]!r} and as {value!r}")
    return table


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
