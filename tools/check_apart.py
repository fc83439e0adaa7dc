"""Replay what opreplay-trim wrote in a child process: an op that kills the process is a finding, not the tool's end."""

from __future__ import annotations

import json
import re
import signal
import subprocess

from replayfmt.errors import ReplayFailed, ReplayMismatch, ReplayRefused
from replayfmt.replay.results import Verification
from replayfmt.trim.trimming import Checked

from .isolate import worker_command
from .replay_flags import ReplayFlags

_STATUS = re.compile(r"[A-Z_]+: ")


def check_apart(path: str, flags: ReplayFlags) -> Checked:
    """The outcome of a capture's replay. Raises ReplayMismatch if the process did not survive it, ReplayRefused and
    ReplayFailed if it was refused or failed."""
    command = worker_command("opreplay_tools.run", "--format=jsonl", *flags.arguments(), "--", path)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ReplayMismatch(
            f"{path}: was not written: the process that replayed it was killed by {name}. What "
            "is embedded in it may be addresses, or memory that a kernel left unwritten: also keep the op that "
            "returns it, or name its result with --opaque-result; --verify=none writes it anyway"
        )
    said = [line.strip() for line in done.stderr.splitlines()] or ["it said nothing"]
    at = next((index for index, line in enumerate(said) if _STATUS.match(line)), 0)  # after what imports print
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    row = next((each for each in rows if each["kind"] == "replay"), None)
    if row is None:
        first, *findings = said[at:]
        status, _colon, message = first.partition(": ")
        if status == ReplayRefused.status:
            raise ReplayRefused(message, tuple(findings))
        raise ReplayFailed(f"{path}: was not written: its replay failed: {first}")
    facts = row["verification"]
    verification = Verification(facts.pop("asked"), facts.pop("mode"), tuple(facts.pop("reasons")), **facts)
    opaque = tuple((*each["op"].rsplit(".", 1), each["result"], each["why"]) for each in row["opaque_results"])
    differs = None
    if row["divergence"] is not None:
        message = said[at]
        differs = message.partition("differs from the capture: ")[2] or message
    return Checked(verification.text, differs, tuple(row["nondeterministic"]), opaque)
