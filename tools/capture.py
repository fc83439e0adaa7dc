"""opreplay-capture: run a Python program and record what it gives its devices."""

from __future__ import annotations

import os
import sys

import click

from replayfmt.recording.marks import parse_mark
from replayfmt.recording.options import COMPILED, DIGESTS, PAYLOADS, CaptureOptions
from replayfmt.recording.program import Program
from replayfmt.recording.supervisor import CapturedProgram, output_path

from .command import run_tool, tool

_COUNT = click.IntRange(min=0)


@tool("opreplay-capture")
@click.option("-o", "--output", required=True, metavar="FILE",
              help="Where to write the capture. {rank} and {pid} are replaced by this process's.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module's name, as in python -m.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--payload", type=click.Choice(PAYLOADS), default="full", show_default=True,
              help="Bytes that no captured op produced: embed them, or record metadata only.")
@click.option("--digests", type=click.Choice(DIGESTS), default="live", show_default=True,
              help="What a replay can compare: what is alive at the end of scopes, every result, or nothing.")
@click.option("--audit", is_flag=True,
              help="Hash the inputs of every op, and import again what was written from outside. Slow.")
@click.option("--compiled", type=click.Choice(COMPILED), default="keep", show_default=True,
              help="torch.compile: run compiled regions as they are (not replayable), or their operators.")
@click.option("--mark", "marks", multiple=True, metavar="MODULE:CALLABLE=SCOPE",
              help="Make every call of a callable a scope. Repeatable.")
@click.option("--module-scopes", is_flag=True, help="Make every call of an nn.Module a scope named by its path.")
@click.option("--start-op", type=_COUNT, metavar="N", help="Record from the Nth op on, counted from 0.")
@click.option("--stop-op", type=_COUNT, metavar="N", help="Record no op from the Nth on.")
@click.option("--start-scope", metavar="NAME", help="Record from the first entry of this scope on.")
@click.option("--stop-scope", metavar="NAME", help="Stop when this scope is left.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def cli(output: str, is_module: bool, force: bool, payload: str, digests: str, audit: bool, compiled: str,
        marks: tuple[str, ...], module_scopes: bool, start_op: int | None, stop_op: int | None,
        start_scope: str | None, stop_scope: str | None, program: str, arguments: tuple[str, ...]) -> None:
    """Run PROGRAM (a script, or with -m a module) with its ARGUMENTS and record what it does into FILE.

    The program behaves as under python, and its exit code is passed on; 1 where only the capture failed.
    Flags after PROGRAM are its own.
    """
    options = CaptureOptions(
        payload=payload, digests=digests, audit=audit, compiled=compiled, force=force,
        start_op=start_op, stop_op=stop_op, start_scope=start_scope, stop_scope=stop_scope,
    )
    captured = CapturedProgram(
        Program(program, arguments, is_module),
        output_path(output, dict(os.environ), os.getpid()),
        options,
        [parse_mark(mark) for mark in marks],
        module_scopes,
    )
    sys.exit(captured.run())


cli.allow_interspersed_args = False  # what follows the program is the program's


def main() -> None:
    run_tool(cli)
