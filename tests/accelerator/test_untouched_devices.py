"""A capture begins to use no device that the program does not use: children that the program forks can use it still."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayfmt.native.building import NotAvailable, compiler, run_compiler
from tests.native_recorder import require_native_recorder

HERE = Path(__file__).parent
# What a program does with the host alone, by what PyTorch itself does not touch a device for; the last two it does.
PROGRAMS = {
    "forward": "y = torch.relu(x @ x); print(y.sum().item() >= 0, y.tolist() != [], y.numpy().shape)",
    "inference": "with torch.inference_mode(): print((x @ x).softmax(-1).sum().item() > 0)",
    "random": "torch.manual_seed(1); print(torch.rand(3).shape, torch.nn.Dropout(0.5)(x).shape)",
    "threads": "t = threading.Thread(target=lambda: print((x + 1).shape)); t.start(); t.join()",
    "setting": "torch.backends.cudnn.allow_tf32 = False; print(torch.nn.functional.conv1d(x[None], x[None]).shape)",
    "backward": "w = x.clone().requires_grad_(); (w @ x).sum().backward(); print(w.grad.shape)",
    "compiled": "print(torch.compile(lambda x: x.sin() + 1, backend='aot_eager')(x).shape)",
}
CODE = """
import contextlib, os, sys, threading, warnings
import torch, replayfmt
warnings.simplefilter("ignore")
def initialized():
    return os.path.exists(log) and len(open(log).readlines())
log = os.environ["FAKE_DRIVER_LOG"]
path, options = sys.argv[1], eval(sys.argv[2])
with contextlib.nullcontext() if path == "none" else replayfmt.capture(path, **options):
    x = torch.randn(4, 4)
    {program}
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    print("a child forked inside cannot use CUDA:", os.waitpid(child, 0)[1] != 0)
print("driver initialized:", int(initialized()))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that counts."""
    if not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch is built without CUDA and loads no driver")
    folder = tmp_path_factory.mktemp("driver")
    try:
        made = str(folder / "libcuda.so.1")
        source = str(HERE / "fake_driver.cpp")
        run_compiler([*compiler(), "-std=c++20", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", made])
    except NotAvailable as problem:
        pytest.skip(f"the driver cannot be built here ({problem})")
    return folder


def printed(driver: Path, folder: Path, program: str, recorder: str = "", options: str = "{}") -> list[str]:
    """What a program prints, with a capture if a recorder is named."""
    log = folder / f"{recorder or 'none'}.log"
    path = str(folder / "c.opreplay") if recorder else "none"
    environment = {"FAKE_DRIVER_LOG": str(log), "LD_LIBRARY_PATH": str(driver), "OPREPLAY_RECORDER": recorder or "auto"}
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("{program}", PROGRAMS[program]), path, options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_capture_initializes_the_driver_as_often_as_the_program_does(
    driver: Path, tmp_path: Path, program: str
) -> None:
    require_native_recorder()
    alone = printed(driver, tmp_path, program)
    if program not in ("backward", "compiled"):
        assert alone[-2:] == ["a child forked inside cannot use CUDA: False", "driver initialized: 0"]
    assert printed(driver, tmp_path, program, "python") == alone
    (tmp_path / "c.opreplay").unlink()
    assert printed(driver, tmp_path, program, "native", '{"digests": "ops", "audit": True}') == alone


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["python", "native"])
def test_an_accelerator_of_another_kind_is_left_alone_until_the_program_uses_it(recorder: str, tmp_path: Path) -> None:
    require_native_recorder()
    code = """
import sys, torch, replayfmt
from device import register
sim = register()
with replayfmt.capture(sys.argv[1], digests="ops", audit=True):
    x = torch.randn(4, 4)
    with torch.inference_mode():
        y = (x @ x).relu() + 1
    y.sum().item()
    before = sim.uses()
    z = x.to("sim:1") + 1
print(before, sim.uses() > 0, z.device)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c.opreplay")],
        capture_output=True,
        text=True,
        env={**os.environ, "OPREPLAY_RECORDER": recorder, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.stdout.split() == ["0", "True", "sim:1"], done.stderr


@pytest.mark.slow
def test_the_tool_does_not_either(driver: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\nx = torch.ones(3) + 1\n")
    log = tmp_path / "log"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "replayfmt",
            "capture",
            "-o",
            str(tmp_path / "c.opreplay"),
            str(tmp_path / "program.py"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "FAKE_DRIVER_LOG": str(log), "LD_LIBRARY_PATH": str(driver)},
    )
    assert done.returncode == 0 and (tmp_path / "c.opreplay").exists(), done.stderr
    assert not log.exists()
