"""Runs opreplay-capture as a user does, and looks into what it wrote."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture

CAPTURE = str(Path(sys.executable).with_name("opreplay-capture"))
LOSSES = re.compile(r"\[.*?\]")  # what train.py prints first
CHECK = str(Path(sys.executable).with_name("opreplay-check"))


def environment(**changes):
    """One thread, so that small machines are not overrun; unset what the tool reads."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def capture(folder, *arguments, stdin="", **variables):
    """Run opreplay-capture in `folder`. The completed process, with text output."""
    return _run(CAPTURE, folder, arguments, stdin, variables)


def plain(folder, *arguments, stdin="", **variables):
    """Run python itself."""
    return _run(sys.executable, folder, arguments, stdin, variables)


def _run(program, folder, arguments, stdin, variables):
    """One that hangs says where, in each of its processes: its stacks are in the failure's text."""
    command, env = [program, *map(str, arguments)], environment(PYTHONFAULTHANDLER="1", **variables)
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=env, text=True, start_new_session=True, **piped) as process:
        try:
            out, err = process.communicate(stdin, timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            raise AssertionError(f"{command} hung:\n{process.communicate()[1]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def started(folder, *arguments, **variables):
    """Start opreplay-capture and wait for the program to say `ready`."""
    process = subprocess.Popen(
        [CAPTURE, *map(str, arguments)],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    raise AssertionError(f"the program never got ready: {process.stderr.read()}")


class Captured:
    """What a closed capture holds, in the terms of these tests."""

    def __init__(self, path):
        reader = open_capture(path)
        try:
            self.complete = reader.complete
            self.session = reader.session
            self.summary = reader.summary
            self.records = list(reader.records())
            self.scope_paths = [reader.scope_path(record.scope) for record in self.records]
            self.kernels = [kernel.qualified_name for kernel in reader.kernels[1:]]
            self.op_names = [
                reader.kernels[record.signature.kernel].qualified_name
                for record in self.records
                if record.kind is RecordKind.op
            ]
        finally:
            reader.close()

    def count(self, kind):
        return sum(record.kind is kind for record in self.records)

    def scopes(self):
        """Begins and ends of scopes in order, as `+name` and `-name`."""
        signs = {RecordKind.scope_begin: "+", RecordKind.scope_end: "-"}
        return [signs[record.kind] + record.argument("name") for record in self.records if record.kind in signs]
