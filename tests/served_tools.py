"""Commands of the tools for tests that run whole documents: forks of one process that has imported PyTorch run them, so
that none waits for the import. `opreplay-capture` is not among them: the program that it runs is to find a new process.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from opreplay_tools.__main__ import TOOLS

SERVED = {
    name: TOOLS[name] for name in ("run", "benchmark", "compare", "trim", "import", "export", "report", "dump", "check")
}
# Hands over its arguments, environment, folder and streams; exits as what was run for it.
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + {address!r})
said = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(said).to_bytes(4, "big")], [0, 1, 2])
server.sendall(said)
answer = server.recv(4)
sys.exit(int.from_bytes(answer, "big") if len(answer) == 4 else "the process that runs tools is gone")
"""


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PATH with every command; those of `SERVED` start sooner."""
    with served_tools(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture
def sooner(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started as `opreplay-run` in the test is that of `commands`."""
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)


@contextmanager
def served_tools(folder: Path) -> Iterator[Path]:
    """See `commands`; made in `folder`."""
    commands, address = folder / "bin", f"opreplay-{uuid4()}"  # a name, since a path may be too long for a socket
    commands.mkdir()
    for name in TOOLS:
        command = commands / f"opreplay-{name}"
        if name not in SERVED:
            command.symlink_to(Path(sys.executable).with_name(command.name))
            continue
        command.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
        command.chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield commands
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Fork for each command, which returns here in the process that runs it."""
    import torch

    modules = {name: importlib.import_module(f"opreplay_tools.{module}") for name, module in SERVED.items()}
    for name in ("replay.plan", "benchmark.run_report", "trim.trimming", "importers.importing"):
        importlib.import_module(f"replayfmt.{name}")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen()
    os.write(1, b"ready\n")
    while True:
        client, _ = listening.accept()
        if os.fork():
            client.close()
            continue
        listening.close()
        length, streams, *_ = socket.recv_fds(client, 4, 3)
        with client.makefile("rb") as said:
            name, arguments, folder, environment = json.loads(said.read(int.from_bytes(length, "big")))
        command = os.fork()
        if command:
            for stream in streams:
                os.close(stream)
            status = os.waitpid(command, 0)[1]
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            client.sendall(code.to_bytes(4, "big"))
            os._exit(0)
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if "OMP_NUM_THREADS" in environment:  # which PyTorch has read already
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.argv = [f"opreplay-{name}", *arguments]
        here = environment.get("PYTHONPATH")
        sys.path[:1] = [os.path.dirname(sys.executable), *(here.split(os.pathsep) if here else ())]
        code: int | str | None = 0
        try:
            modules[name].main()
        except SystemExit as leaving:
            code = leaving.code
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)  # taking PyTorch down takes as long as many a command


if __name__ == "__main__":
    serve(sys.argv[1])
