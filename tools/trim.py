"""opreplay-trim: turn part of a capture into a smaller capture or a script.

What it wrote is replayed in a child process: an op that kills the process is a finding, not the tool's end.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click

from replayfmt.dump.selection import OpSelection
from replayfmt.errors import ReplayFailed, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.output import check_place, make_folder
from replayfmt.format.reader import open_capture
from replayfmt.format.validation import counted
from replayfmt.replay.results import Verification
from replayfmt.trim.trimming import (
    Prediction,
    ReplayCheck,
    TrimResult,
    Verify,
    strip_capture,
    trim_capture,
    used_remaps,
)

from .command import console_script, emit, option, printing_on, reader_may_leave, record_bar, say, tool
from .replay_flags import ReplayFlags, flag_of, replay_options, selection_options, worker_command

_STATUS = re.compile(r"[A-Z_]+: ")


def check_apart(path: str, flags: ReplayFlags) -> ReplayCheck:
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
    return ReplayCheck(verification.text, differs, tuple(row["nondeterministic"]), opaque)


@tool(
    "opreplay-trim",
    ("opreplay-trim --scope=execute step.opreplay execute.opreplay", "One scope, with the memory it needs:"),
    ("opreplay-trim --kernel=aten::mm --ops=:100 step.opreplay --script mm.py", "A script that needs torch alone:"),
    ("opreplay-trim --payload=none step.opreplay shared.opreplay", "Without content, safe to share:"),
)
@selection_options
@option(
    "--payload",
    "Content of the result: everything its ops need (full); only integers, floating-point content being synthesized "
    "from its statistics; or only metadata, safe to share (none).",
    type=["full", "integers", "none"],
    default="full",
)
@option("--redact", "Leave out host name, user, command line, and the directories of files.")
@option(
    "--no-sources",
    "Leave out the source of kernels that are not operators, intermediate code that names files, and the paths in "
    "their metadata: a replay needs binaries that fit its machine.",
)
@option(
    "--script OUT.py",
    "Write the selected ops as a Python script that needs only torch, instead of a capture: one op per line, and a "
    "timing loop. With --allow-code also Triton kernels, whose source from the capture is in the script.",
)
@option(
    "--script-data FILE",
    "With --script: write the inputs to FILE (safetensors), which the script loads. Without it the script synthesizes "
    "them.",
)
@option(
    "--vectors DIR",
    "Write each selected op's inputs and results into the new directory DIR as test vectors for a kernel, instead of "
    "a capture: safetensors and JSON (docs/vectors.md).",
)
@option(
    "--partial", "With --vectors: leave out the ops that a vector cannot express, and list them, instead of refusing."
)
@option("--force", "Replace an existing file, or an existing directory of test vectors.")
@replay_options
@click.argument("capture", metavar="IN", type=click.Path())
@click.argument("out", metavar="[OUT]", type=click.Path(), required=False)
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str,
    out: str | None,
    wanted: OpSelection,
    payload: str,
    redact: bool,
    no_sources: bool,
    script: str | None,
    script_data: str | None,
    vectors: str | None,
    partial: bool,
    force: bool,
    flags: ReplayFlags,
) -> None:
    """Write a part of the capture IN to OUT. Of the folder of all ranks, the same part of each, to another folder.

    OUT replays on its own and produces the same results. The part's inputs are computed by replaying IN up to the
    part's end, and verified. Selections of several kinds keep what all of them select. Without any, everything is kept,
    which makes sense with --payload=none.

    Exits with 0 if OUT was written and verified as asked, 1 if the replay was refused, failed or did not match, 2 for
    wrong usage, 3 if IN is missing, unreadable or not valid.
    """
    flags.refuse_other_kernels("kept content comes from the captured kernels; substitute when you replay the result")
    if script is None and script_data is not None:
        raise UsageError("--script-data is for --script")
    if partial and vectors is None:
        raise UsageError("--partial is for --vectors")
    if sum(each is not None for each in (script, vectors, out)) != 1:
        raise UsageError("name one output: OUT for a capture, --script=OUT.py, or --vectors=DIR")
    for flag, given in (("--redact", redact), ("--no-sources", no_sources)):
        if given and out is None:
            raise UsageError(f"{flag} is for captures")
    if os.path.isdir(capture):
        if out is None:
            raise UsageError(f"{capture}: of the folder of all ranks, a part is captures in another folder; name OUT")
        _trim_ranks(context, capture, out, force)
        return
    if vectors is not None:
        if payload != "full":
            raise UsageError(f"--payload={payload} is for captures; test vectors are content")
        _vectors(capture, vectors, wanted, force, partial, flags)
        return
    if script is not None:
        if payload != "full":
            raise UsageError(f"--payload={payload} is for captures; a script without --script-data has no content")
        _script(capture, script, script_data, wanted, force, flags)
        return
    assert out is not None
    if payload == "none":
        _replays_nothing(flags, "--payload=none")
        _strip(capture, out, wanted, force, flags, not no_sources)
        return
    less = RedactionOptions(redact, payload == "integers", not no_sources)
    if wanted.everything and less != RedactionOptions():
        _replays_nothing(flags, "--redact, --no-sources or --payload=integers without a selection")
        _report(_copy(capture, out, less, force, flags.allow_incomplete))
        return
    if wanted.everything:
        raise UsageError(
            "nothing is selected: give --ops, --scope, --kernel or --signature (or --payload=none, "
            "--payload=integers, --redact or --no-sources, to keep everything, with less in it)"
        )
    if less == RedactionOptions():
        _report(_trim(capture, out, wanted, force, flags))
        return
    check_place(out, force)
    with TemporaryDirectory(prefix=".trim-", dir=os.path.dirname(out) or ".") as folder:
        part = os.path.join(folder, os.path.basename(out))
        trimmed = _trim(capture, part, wanted, force, flags)
        _report(_copy(part, out, less, force, allow_incomplete=False), trimmed)


def _trim_ranks(context: click.Context, folder: str, out: str, force: bool) -> None:
    """The same part of every rank's file, if the parts belong together."""
    from replayfmt.format.rank_files import MANIFEST, rank_file, world_size, write_manifest

    ranks = range(world_size(folder))
    if os.path.realpath(folder) == os.path.realpath(out):
        raise UsageError(f"{out}: is the folder to trim; name another one")
    made = not os.path.exists(out)
    make_folder(out)
    try:
        for path in (*(rank_file(out, rank) for rank in ranks), os.path.join(out, MANIFEST)):
            check_place(path, force)
        with TemporaryDirectory(prefix=".trim-", dir=out) as parts:
            for rank in ranks:
                say(f"rank {rank}")
                given = {"capture": rank_file(folder, rank), "out": rank_file(parts, rank)}
                printed = io.StringIO()
                with printing_on(printed):
                    context.invoke(cli, **(context.params | given))
                for line in printed.getvalue().replace(parts, out.rstrip("/")).splitlines():
                    say(line)
            problems = write_manifest(parts)["problems"]
            if problems:
                raise ReplayRefused(f"{out}: was not written: the parts of the ranks do not belong together", problems)
            for name in os.listdir(parts):
                os.replace(os.path.join(parts, name), os.path.join(out, name))
    finally:
        if made and not os.listdir(out):
            os.rmdir(out)
    say(f"{out}: {len(ranks)} ranks")


_DEFAULTS = (("verify", "auto"), ("streams", "captured"), ("graphs", "captured"), ("autotune", "captured"))


def _replays_nothing(flags: ReplayFlags, why: str) -> None:
    """Refuse flags on how to replay if nothing is replayed."""
    given = [
        flag_of(name)
        for name, value in vars(flags).items()
        if value and name != "allow_incomplete" and (name, value) not in _DEFAULTS
    ]
    if given:
        raise UsageError(f"{why} replays nothing: leave {', '.join(given)} out")


def _strip(capture: str, out: str, wanted: OpSelection, force: bool, flags: ReplayFlags, sources: bool) -> None:
    with open_capture(capture) as reader:
        _report(
            strip_capture(
                reader,
                out,
                wanted,
                force=force,
                allow_incomplete=flags.allow_incomplete,
                words=_user(),
                sources=sources,
                on_prediction=_predicted,
            )
        )


class RedactionOptions(NamedTuple):
    """What a copy of a whole capture is to have less in it."""

    redact: bool = False
    integers_only: bool = False
    sources: bool = True


def _copy(capture: str, out: str, less: RedactionOptions, force: bool, allow_incomplete: bool) -> TrimResult:
    from replayfmt.trim.trimming import copy_capture

    with open_capture(capture) as reader:
        return copy_capture(
            reader, out, **less._asdict(), force=force, allow_incomplete=allow_incomplete, words=_user()
        )


def _user() -> tuple[str, ...]:
    try:
        return (getpass.getuser(),)
    except (KeyError, OSError, ImportError):
        return ()  # a user this system has no name for


def _trim(capture: str, out: str, wanted: OpSelection, force: bool, flags: ReplayFlags) -> TrimResult:
    def check(path: str, verify: Verify) -> ReplayCheck:
        with open_capture(path) as reader:
            remaps = used_remaps(reader, flags.replay_file_remap)
        # What --opaque-result named is in the result's session.
        return check_apart(path, replace(flags, replay_file_remap=remaps, verify=verify, opaque_results=()))

    with flags.plan(capture, keep_going=True) as plan, record_bar("replaying", plan.reader.record_count) as on_progress:
        return trim_capture(
            plan,
            out,
            wanted,
            check,
            verify=flags.verify,
            force=force,
            on_prediction=_predicted,
            on_progress=on_progress,
        )


def _script(capture: str, out: str, data: str | None, wanted: OpSelection, force: bool, flags: ReplayFlags) -> None:
    from replayfmt.trim.script import script_with_data, synthesized_script

    if data is None:
        _replays_nothing(replace(flags, allow_code=False), "--script without --script-data")
        with open_capture(capture) as reader:
            result = synthesized_script(
                reader,
                out,
                wanted,
                force=force,
                allow_incomplete=flags.allow_incomplete,
                allow_code=flags.allow_code,
                on_prediction=_predicted,
            )
    else:
        with flags.plan(capture, keep_going=True) as plan:
            result = script_with_data(
                plan, out, data, wanted, verify=flags.verify, force=force, on_prediction=_predicted
            )
        say(f"replayed  {result.verified}")
        say(f"{data}: {result.data_bytes:,} bytes of inputs")
    say(f"{result.path}: {result.ops:,} ops, {result.inputs:,} inputs")


def _vectors(capture: str, out: str, wanted: OpSelection, force: bool, partial: bool, flags: ReplayFlags) -> None:
    from replayfmt.trim.vectors import write_vectors

    with flags.plan(capture, keep_going=True) as plan:
        result = write_vectors(
            plan,
            out,
            wanted,
            verify=flags.verify,
            force=force,
            partial=partial,
            allow_incomplete=flags.allow_incomplete,
        )
        made_up = plan.synthesis.reason
    say(f"replayed  {result.verified}")
    if made_up:
        say(f"note      inputs that the capture does not hold are made up: {made_up}")
    for sentence in result.left_out:
        say(f"left out  {sentence}")
    say(f"{result.path}: test vectors of {result.ops:,} op{'' if result.ops == 1 else 's'}, {result.bytes:,} bytes")


def _predicted(prediction: Prediction) -> None:
    with reader_may_leave():  # what is predicted is still to be done
        emit(prediction.text)


def _report(result: TrimResult, trimmed: TrimResult | None = None) -> None:
    """Report what was written; `trimmed` is the verified capture of which it is a copy."""
    verified = trimmed or result
    if verified.verified:
        say(f"replayed  {verified.verified}")
        say(f"checked   {verified.checked}")
    for note in (*(trimmed.notes if trimmed is not None else ()), *result.notes):
        say(f"note      {note}")
    say(
        f"{result.path}: {result.bytes:,} bytes, {counted(result.ops, 'op')} in {counted(result.records, 'record')}, "
        f"{result.embedded_bytes:,} bytes of content"
    )


main = console_script(cli)

if __name__ == "__main__":
    main()
