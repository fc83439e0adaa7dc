"""The file flags of opreplay-capture: each changes what is in the capture; wrong ones stop it before the program."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from replayfmt.format.codes import StorageOrigin
from replayfmt.format.external_files import digest_file
from replayfmt.format.reader import open_capture

from .running import capture

PROGRAM = """
import os, sys
import torch
from safetensors.torch import load_file

os.chdir("/")  # whatever was named before was named from elsewhere
copies = {name: tensor.clone() for name, tensor in load_file(sys.argv[1]).items()} if "clone" in sys.argv else \
    load_file(sys.argv[1])
if os.environ.get("RECORDED") == "later":
    import replayfmt
    with replayfmt.scope("here"):
        print(float((copies["w"] @ copies["w"]).sum()))
else:
    print(float((copies["w"] @ copies["w"]).sum()))
"""
EXPECTED = "512.0\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "program.py").write_text(PROGRAM)
    save_file({"w": torch.ones(8, 8)}, folder / "w.safetensors")
    return folder


def run(folder, *flags, program=()):
    return capture(folder, "--force", "-o", "c.opreplay", *flags, "program.py", folder / "w.safetensors", *program)


def look(folder):
    """The origins of storages, the files and the ranges of the capture."""
    with open_capture(folder / "c.opreplay") as reader:
        origins = {origin.name: count for origin, count in reader.summary.origins.items() if count}
        return origins, list(reader.files)[1:], list(reader.file_ranges)[1:], reader.session.policies


@pytest.mark.slow
def test_a_mapped_file_is_a_reference_without_any_flag(folder):
    done = run(folder)
    assert done.returncode == 0 and done.stdout == EXPECTED
    origins, files, _, policies = look(folder)
    assert origins[StorageOrigin.external_file.name] == 1 and files[0].path == str(folder / "w.safetensors")
    assert (policies["file-policy"], policies["file-validation"]) == ("reference", "identity")


@pytest.mark.slow
def test_a_named_file_is_found_in_copies(folder):
    """A copy that was made before recording began: no op of the capture says where it came from."""
    shutil.copy(folder / "w.safetensors", folder / "named.safetensors")
    flags = ("--start-scope=here", "--file=named.safetensors", "--file-validation=digest")
    done = capture(
        folder, "--force", "-o", "c.opreplay", *flags, "program.py", folder / "w.safetensors", "clone", RECORDED="later"
    )
    assert done.returncode == 0 and done.stdout == EXPECTED, done.stderr
    _, files, _, policies = look(folder)
    assert [(file.path, file.digest) for file in files] == [
        (os.path.realpath(folder / "named.safetensors"), digest_file(folder / "named.safetensors"))
    ]
    assert policies["file-validation"] == "digest"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "whole", "part"), [("capture-ranges", False, True), ("capture-all", True, False)])
def test_the_policy_decides_what_is_embedded(folder, policy, whole, part):
    assert run(folder, f"--file-policy={policy}").returncode == 0
    _, files, ranges, policies = look(folder)
    assert (bool(files[0].payload), bool(ranges[0].payload)) == (whole, part)
    assert policies["file-policy"] == policy


@pytest.mark.slow
def test_a_forbidden_file_fails_the_capture_and_not_the_program(folder):
    done = run(folder, "--file-policy=fail")
    assert done.returncode == 1 and done.stdout == EXPECTED
    assert "w.safetensors" in done.stderr and "file-policy=fail" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--file=missing.safetensors"], "--file=missing.safetensors: No such file"),
        (["--file=program.py/x"], "Not a directory"),
        (["--file-policy=copy"], "capture-ranges"),
        (["--payload=none", "--file-validation=digest"], "payload='none'"),
    ],
)
def test_wrong_flags_stop_before_the_program(folder, flags, said):
    done = run(folder, *flags)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
