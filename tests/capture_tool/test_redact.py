"""Captures to be shared: what must not be in them is in no byte of the file."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors.torch import save_file

from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture

from .running import Captured, capture

SECRET_ARGUMENT = "sesame-open-8841"
PROGRAM = """
import getpass, os, platform, sys
platform.node = lambda: "workstation-7731"
import torch
from safetensors.torch import load_file

weights = load_file(sys.argv[1])
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    model.weight.copy_(weights["w"])
    secret = torch.frombuffer(bytearray(b"ATTACK AT DAWN!!" * 64), dtype=torch.float32)
    numbers = torch.frombuffer(bytearray(b"RETREAT AT DUSK!" * 64), dtype=torch.int64)
    tag = torch.tensor([1234567.0625, 7654321.125])
label = f"loading {os.path.abspath(sys.argv[1])} on {platform.node()} of {getpass.getuser()}"
with torch.profiler.record_function(label):
    y = model(torch.ones(1, 4)) + secret[:4] + weights["w"][0]
print((y.sum() + tag)[0].item() > 0, (numbers * 2).sum().item())
numbers.tolist()
torch.manual_seed(918273645)
torch.randn(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of-a-secret-project")
    (folder / "secret_program.py").write_text(PROGRAM)
    save_file({"w": torch.full((4, 4), 0.7853982)}, folder / "weights.safetensors")
    return folder


def everything(path):
    """All bytes of a capture, and those of each frame and payload that is stored compressed."""
    data = Path(path).read_bytes()
    parts, position = [data], 0
    while (position := data.find(b"\x28\xb5\x2f\xfd", position)) >= 0:
        with contextlib.suppress(zstandard.ZstdError):  # four bytes that only look like a beginning
            parts.append(zstandard.ZstdDecompressor().decompressobj().decompress(data[position:]))
        position += 4
    with open_capture(path) as reader:
        parts += [bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1)]
    return b"\0".join(parts)


def names(folder):
    """What tells of the machine and its user."""
    found = {
        "directory": str(folder),
        "project": folder.name,
        "program": "secret_program",
        "argument": SECRET_ARGUMENT,
        "host": "workstation-7731",
        "user": "mallory-jones",
    }
    return {what: name.encode() for what, name in found.items()}


def run(folder, output, *flags):
    done = capture(
        folder,
        "--force",
        "-o",
        output,
        *flags,
        "secret_program.py",
        "weights.safetensors",
        SECRET_ARGUMENT,
        LOGNAME="mallory-jones",
    )
    assert done.returncode == 0, done.stderr
    return folder / output


@pytest.mark.slow
def test_an_ordinary_capture_tells_all_of_it(folder):
    content = everything(run(folder, "open.opreplay"))
    assert [what for what, name in names(folder).items() if name not in content] == []
    assert b"ATTACK AT DAWN!!" in content and b"RETREAT AT DUSK!" in content


@pytest.mark.slow
def test_a_redacted_capture_names_neither_machine_nor_user(folder):
    path = run(folder, "redacted.opreplay", "--redact")
    content = everything(path)
    assert [what for what, name in names(folder).items() if name in content] == []
    session = Captured(path).session
    assert (session.host, session.argv, session.working_directory) == (None, (), None)
    assert session.policies["redact"] is True
    assert session.torch_version == torch.__version__
    with open_capture(path) as reader:
        assert [file.path for file in list(reader.files)[1:]] == ["weights.safetensors"]


@pytest.mark.slow
def test_a_capture_without_payloads_holds_no_byte_of_content(folder):
    path = run(folder, "none.opreplay", "--payload=none")
    content = everything(path)
    told = [what for what, name in names(folder).items() if name in content]
    assert told == []
    state = torch.Generator().manual_seed(918273645).get_state().numpy().tobytes()
    values = {
        "floats": b"ATTACK AT DAWN!!",
        "integers": b"RETREAT AT DUSK!",
        "state": state[:64],
        "weights": torch.full((2,), 0.7853982).numpy().tobytes(),
        "tag": torch.tensor([1234567.0625, 7654321.125]).numpy().tobytes(),
        "double": torch.tensor(1234567.0625, dtype=torch.float64).numpy().tobytes(),
        "sum": torch.frombuffer(bytearray(b"RETREAT AT DUSK!" * 64), dtype=torch.int64).mul(2).sum().numpy().tobytes(),
    }
    assert [what for what, value in values.items() if value in content] == []
    captured = Captured(path)
    assert captured.summary.records[RecordKind.op] > 5 and captured.summary.absent_storages > 0


@pytest.mark.slow
def test_files_of_the_same_name_stay_apart_when_redacted(folder):
    other = folder / "other"
    other.mkdir(exist_ok=True)
    save_file({"w": torch.ones(4, 4)}, other / "weights.safetensors")
    (folder / "two.py").write_text(
        "from safetensors.torch import load_file\n"
        "(load_file('weights.safetensors')['w'] + load_file('other/weights.safetensors')['w']).sum()\n"
    )
    done = capture(folder, "--force", "-o", "two.opreplay", "--redact", "two.py")
    assert done.returncode == 0, done.stderr
    with open_capture(folder / "two.opreplay") as reader:
        assert [file.path for file in list(reader.files)[1:]] == ["weights.safetensors", "2/weights.safetensors"]
    assert os.fsencode(folder) not in everything(folder / "two.opreplay")
