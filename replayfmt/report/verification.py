"""What is said of verification, and by which file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replayfmt.benchmark.comparison.baseline import Document
from replayfmt.format.printable import printable

from .documents import Fields
from .kernel_sections import KernelFigures
from .tables import LONGEST_TEXT

_COMPARED = {
    "digests": "digests",
    "host_reads": "host reads",
    "scalars": "scalars the program read",
    "structures": "ops' results by their shapes",
}


@dataclass(frozen=True)
class VerificationNote:
    """`source` is the file that says it, `command` what verifies, where nothing says it."""

    verified: bool
    text: str
    source: str = ""
    command: str = ""


def verification_notes(
    benchmarks: Sequence[tuple[str, Document]], runs: Sequence[Fields], figures: KernelFigures
) -> list[VerificationNote]:
    """Of each file that says anything; else how to find out. Raises UsageError for damaged files."""
    found = []
    for where, document in benchmarks:
        text = document["context"].get("verified")
        if isinstance(text, str):
            found.append(_note("not verified" not in text, text, where))
    found += [_note(*_verdict(row), row.where) for row in runs]
    if found:
        return found
    return [
        VerificationNote(
            False, "not verified: no result of a replay was given. This verifies it:", "", figures.command("run")
        )
    ]


def _note(verified: bool, text: str, source: str) -> VerificationNote:
    return VerificationNote(verified, printable(text, LONGEST_TEXT), printable(source))


def _verdict(row: Fields) -> tuple[bool, str]:
    """Of what opreplay-run printed."""
    outcome, verification = row.text("outcome"), row.fields("verification")
    mode = verification.text("mode")
    devices = ", ".join(row.texts("devices")) or "no device"
    if outcome == "mismatched" and row.has("divergence"):
        first = row.fields("divergence")
        where = (
            f"first at ordinal {first.count('ordinal'):,} ({first.text('op')})"
            if first.has("ordinal")
            else "at the end"
        )
        return False, f"not verified: the replay on {devices} differs from the capture, {where}"
    if mode == "none":
        return False, f"not verified: {'; '.join(verification.texts('reasons')) or 'nothing was compared'}"
    if outcome != "ok":
        verdicts = row.fields("verdicts").content if row.has("verdicts") else {}
        counts = ", ".join(f"{count} {name}" for name, count in verdicts.items())
        return False, f"not verified: the replay on {devices} is {outcome}{counts and ': ' + counts}"
    compared = {name: verification.count(name) for name in _COMPARED}
    parts = [f"{count:,} {_COMPARED[name]}" for name, count in compared.items() if count]
    text = f"{mode}, on {devices}; compared: {', '.join(parts) or 'nothing'}"
    if row.has("nondeterministic") and (names := row.texts("nondeterministic")):
        text += f"; nondeterministic: {'; '.join(names)}"
    for name, what in (("unsupported", "records of work that cannot be replayed"), ("left_out", "records left out")):
        count = row.count(name) if name == "unsupported" else len(row.texts(name))
        text += f"; {count:,} {what}" if count else ""
    return bool(parts), text
