"""The cost of programs whose calls are not all alike: they make new shapes, arrays and scratch memory all the time.

Such calls take the complete path, which is Python. Programs of real packages show the cost for each operator. Measured
alone: batches that NumPy makes, tensors read as arrays, collectives, the first start in a process. The steadiness of
a loop's steps shows whether writing the file stalls the program.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny_gpt2
import torch
from measuring import arguments, in_turns, median_of, progress, row, scratch, seconds

import replayfmt

Step = Callable[[], object]


def torchdiffeq() -> Step:
    from torchdiffeq import odeint

    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    y, t = torch.ones(8, 2), torch.linspace(0, 1, 5)
    return lambda: odeint(lambda _t, y: net(y), y, t, method="dopri5").sum().backward()


def kornia() -> Step:
    from kornia.augmentation import ColorJitter, RandomAffine, RandomHorizontalFlip
    from kornia.filters import gaussian_blur2d

    augment = torch.nn.Sequential(RandomHorizontalFlip(p=0.5), RandomAffine(15.0), ColorJitter(0.1, 0.1, 0.1, 0.1))
    images = torch.rand(2, 3, 16, 16)
    return lambda: gaussian_blur2d(augment(images), (3, 3), (1.0, 1.0)).mean()


def skorch() -> Step:
    from skorch import NeuralNetClassifier

    random = np.random.default_rng(0)
    inputs, labels = random.random((64, 10), np.float32), random.integers(0, 2, 64)
    layers = (torch.nn.Linear(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Softmax(-1))
    net = NeuralNetClassifier(torch.nn.Sequential(*layers), max_epochs=1, lr=0.1, batch_size=16, verbose=0)
    net.initialize()
    return lambda: (net.partial_fit(inputs, labels), net.predict_proba(inputs))


def torch_geometric() -> Step:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv

    convolution, random = GCNConv(4, 8), np.random.default_rng(0)

    def step() -> None:
        counts = random.integers(4, 9, 4).tolist()
        graphs = [Data(x=torch.rand(n, 4), edge_index=torch.randint(0, n, (2, 3 * n))) for n in counts]
        batch = Batch.from_data_list(graphs)
        convolution(batch.x, batch.edge_index).relu().sum().backward()

    return step


def monai() -> Step:
    from monai.transforms import Compose, RandFlip, RandGaussianNoise, RandRotate90, ScaleIntensity, ToTensor

    transforms = Compose([ScaleIntensity(), RandFlip(0.5), RandRotate90(0.5), RandGaussianNoise(0.5), ToTensor()])
    convolution, random = torch.nn.Conv2d(1, 4, 3), np.random.default_rng(0)

    def step() -> None:
        images = [transforms(random.random((1, 16, 16), np.float32)) for _ in range(4)]
        convolution(torch.stack(images).as_tensor()).mean().backward()

    return step


def measure_package(package: Callable[[], Step], path: Path, steps: int, rounds: int) -> None:
    what = f"capture, a step of {package.__name__}: added for each operator"
    try:
        step = package()
    except ImportError:
        row(what, None, "us", reason=f"{package.__name__} is not installed")
        return

    def repeated() -> None:
        for _ in range(steps):
            step()

    def captured() -> float:
        with replayfmt.capture(path, force=True):
            repeated()  # what is new
            return seconds(repeated)

    repeated()
    operators = tiny_gpt2.operators(repeated)
    taken = in_turns({"eager": lambda: seconds(repeated), "captured": captured}, rounds)
    row(
        what,
        median_of(lambda eager, captured: captured - eager, *taken.values()) / operators * 1e6,
        "us",
        at_most=15,
        operators=operators / steps,
        times_eager=median_of(lambda eager, captured: captured / eager, *taken.values()),
    )


def measure_arrays(path: Path, count: int, rounds: int) -> None:
    def batches(length: int) -> None:
        for number in range(count):
            torch.from_numpy(np.full((length, length), number, np.float32)).sum()

    tensors = [torch.ones(16) + number for number in range(count)]

    def reads() -> None:
        for tensor in tensors:
            tensor.numpy()

    def captured(work: Callable[[], None]) -> float:
        with replayfmt.capture(path, force=True):
            tensors[:] = [tensor + 1 for tensor in tensors]
            return seconds(work)

    for length in (64, 256):
        what = f"a batch of {length * length * 4 >> 10} KiB that NumPy made"
        measure_each(what, functools.partial(batches, length), captured, count, rounds, at_most=100)
    measure_each("a tensor read as an array", reads, captured, count, rounds, at_most=10)


def measure_collectives(path: Path, count: int, rounds: int) -> None:
    if not torch.distributed.is_available():
        row("capture, a small all-reduce: added", None, "us", reason="this PyTorch has no distributed package")
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{path.parent}/store", rank=0, world_size=1)
    try:
        tensor = torch.ones(16)

        def reduces() -> None:
            for _ in range(count):
                torch.distributed.all_reduce(tensor)

        def captured(work: Callable[[], None]) -> float:
            with replayfmt.capture(path, force=True):
                work()  # what is new
                return seconds(work)

        measure_each("a small all-reduce", reduces, captured, count, rounds, at_most=5)
    finally:
        torch.distributed.destroy_process_group()


def measure_each(
    what: str,
    work: Callable[[], None],
    captured: Callable[[Callable[[], None]], float],
    count: int,
    rounds: int,
    at_most: float,
) -> None:
    """What a capture adds to each of the `count` things that `work` does."""
    work()
    taken = in_turns({"eager": lambda: seconds(work), "captured": lambda: captured(work)}, rounds)
    added = median_of(lambda eager, captured: captured - eager, *taken.values()) / count * 1e6
    times_eager = median_of(lambda eager, captured: captured / eager, *taken.values())
    row(f"capture, {what}: added", added, "us", at_most=at_most, times_eager=times_eager)


def measure_steadiness(path: Path, steps: int) -> None:
    """By the wall clock, whatever the others go by: a stall is a wait. Other processes stall both programs."""
    run = tiny_gpt2.forward()

    def settled() -> np.ndarray:
        times_s = []
        for _ in range(steps):
            begin = time.perf_counter()
            run()
            times_s.append(time.perf_counter() - begin)
        return np.array(times_s[len(times_s) // 10 :])

    alone = settled()
    with replayfmt.capture(path, force=True, payload="none"):
        captured = settled()
    spread = {name: float(np.percentile(each, 95) / np.median(each)) for name, each in (("a", alone), ("c", captured))}
    row(
        "capture, metadata only, forward: 95th percentile of a step / median",
        spread["c"],
        at_most=1.3,
        without_a_capture=spread["a"],
        median_us=float(np.median(captured)) * 1e6,
    )


_START = """
import time, sys, numpy, torch
import replayfmt
begin = time.process_time()
capture = replayfmt.capture(sys.argv[1], force=True)
capture.__enter__()
print((time.process_time() - begin) * 1e3)
torch.ones(1)
capture.__exit__(None, None, None)
"""


def measure_start(path: Path, times: int) -> None:
    """In processor time. The first of the processes compiles the modules and does not count."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(path.parent / "bytecode")
    command = [sys.executable, "-c", _START, str(path)]
    taken = [float(subprocess.check_output(command, env=environment)) for _ in range(times + 1)][1:]
    row("capture, the first start in a process", statistics.median(taken), "ms", at_most=150, each=taken)


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # the packages' own
    with scratch() as directory:
        path = directory / "complete.opreplay"
        for package in (torchdiffeq, kornia, skorch, torch_geometric, monai):
            progress(package.__name__)
            measure_package(package, path, 1 if quick else 10, 1 if quick else 5)
        measure_arrays(path, 20 if quick else 1000, 1 if quick else 5)
        measure_collectives(path, 20 if quick else 1000, 1 if quick else 5)
        measure_steadiness(path, 20 if quick else 3000)
        measure_start(path, 1 if quick else 5)


if __name__ == "__main__":
    main()
