"""A replay in one call, and one op's values: what `replayfmt.run(...)`, `op.inputs()` and `op.results()` do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from replayfmt.errors import ContentNotCaptured, InvalidCapture, ReplayMismatch, UsageError
from replayfmt.format.arguments import flag_of
from replayfmt.format.codes import OpStatus
from replayfmt.format.model import Record
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.memory import undispatched

from .held import HeldContent
from .op_values import python_values
from .plan import Plan
from .report import as_rows, as_text
from .results import Divergence, ReplayResult, VerifyMode
from .taking import taken

if TYPE_CHECKING:
    from replayfmt.initializers import Initializer

    from .substitution.requests import Substitution


class PlanOptions(TypedDict, total=False):
    """What a replay runs on and what it accepts: the parameters of `Plan` with the same names."""

    devices: Sequence[str]
    allow_incomplete: bool
    file_remaps: Sequence[str]
    initializers: Sequence[Initializer]
    initializer_options: Mapping[str, str]
    substitutions: Sequence[str | Substitution]
    allow_imports: Iterable[str]
    allow_operators: Iterable[str]
    allow_code: bool
    opaque_results: Iterable[str]


@dataclass(frozen=True)
class Replayed:
    """A finished replay. `text` is what opreplay-run prints of it, `rows` are the rows of its --format=jsonl; `result`
    has everything as values. Prints as the text."""

    path: str
    result: ReplayResult
    text: str
    rows: tuple[dict[str, Any], ...]

    @property
    def outcome(self) -> str:
        """`ok` if the whole capture was replayed and nothing differs; else `mismatched` or `incomplete`."""
        return self.result.outcome

    @property
    def verified(self) -> str:
        """One line: how the results were verified, or why nothing was."""
        return self.result.verified

    @property
    def divergence(self) -> Divergence | None:
        """The first difference from the capture."""
        return self.result.divergence

    @property
    def elapsed_ns(self) -> int:
        """How long the ops took, in nanoseconds."""
        return self.result.elapsed_ns

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def run(
    path: str | PathLike[str],
    *,
    verify: VerifyMode = "auto",
    keep_going: bool = False,
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Replayed:
    """Replay a capture and verify the results, as opreplay-run does. `options` are those of Plan.

    Raises ReplayMismatch if the replay differs from the capture, unless `check` is False: then the result says so.
    With `keep_going` everything runs that can, and `result.verdicts` says what became of each op. Raises ReplayRefused
    with every finding, ReplayFailed if an op fails, and what opening the file raises.
    """
    check = flag_of("check", check)
    with Plan(path, keep_going=keep_going, **options) as plan:
        result = plan.execute(verify=verify, keep_going=keep_going, scope_times=True)
        text = "\n".join(map(printable, as_text(plan, result)))
        replayed = Replayed(plan.reader.path, result, text, tuple(as_rows(plan, result)))
    if check and result.divergence is not None:
        raise ReplayMismatch(f"{replayed.path}: the replay differs from the capture: {result.divergence}")
    return replayed


def op_values(reader: CaptureReader, record: Record, *, results: bool, replay: bool, options: PlanOptions) -> list[Any]:
    """What an op takes, or with `results` what it returns: from the capture itself, or with `replay` from a verified
    replay of what comes before.

    Raises ContentNotCaptured if neither has it, InvalidCapture, and with `replay` what a replay raises.
    """
    if results and record.signature.status is not OpStatus.ok:
        raise ContentNotCaptured(
            f"{reader.path}: ordinal {record.ordinal} raised an error under capture, so it has no results"
        )
    if flag_of("replay", replay):
        if options.get("substitutions", ()) not in ((), []):
            raise UsageError("substitutions: an op's values are those of the captured kernels")
        with Plan(reader, keep_going=True, **options) as plan:
            return taken(plan, record.ordinal, results=results)
    odd = sorted(set(options) - {"file_remaps"})
    if odd:
        raise UsageError(f"{', '.join(odd)}: say how to replay; give replay=True, too")
    nodes, values = record.signature.args, record.args
    if results:
        nodes, values = record.signature.results, record.results
    with undispatched(), HeldContent(reader, options.get("file_remaps", ())) as held:
        held.look(record, results=results)
        return python_values(reader, nodes, values, held.tensor, "result " if results else "")


def named(record: Record, values: Sequence[Any]) -> dict[str, Any]:
    """An op's arguments by name. Raises InvalidCapture if two have the same."""
    found = {node.name: value for node, value in zip(record.signature.args, values, strict=True)}
    if len(found) != len(values):
        raise InvalidCapture(f"ordinal {record.ordinal}: two arguments have one name")
    return found
