"""The energy of a BLOOM-560m's generation, as a whole and kernel by kernel: from the capture to a report with pictures.

    python examples/energy/bloom_energy.py DIRECTORY [--small] [--tokens N] [--model FILE] [--recorded] [-- FLAGS]

Runs the tools that a person would, and prints each command: it captures `bloom_generate.py`, measures the capture with
`opreplay-benchmark --energy` (FLAGS are for it: `--op-limit=20`), makes a page with `opreplay-report`, and pictures
with matplotlib. With --model, the work is one inference of a model file, TorchScript (FILE.pt) or an exported program
(FILE.pt2), which is exported first if it is not there. With --recorded, and where PyTorch finds no GPU, no power is
measured: it runs the windows, makes a log of power up, and integrates that with `opreplay-energy`. The figures are then
those of the log, and of no device.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# Watts of the made-up log: of a board that does nothing, and of each kind of work.
IDLE_W = 60.0
# Of the made-up log's source, unless FLAGS say otherwise. It averages nothing, so that windows can be short.
MADE_UP = ("--power-interval=0.002", "--power-averaging=0.03")
WORK_W = {
    "whole": 230.0,
    "scope": 230.0,
    "restore": 110.0,
    "matrix product or convolution": 310.0,
    "data movement": 150.0,
    "other operator": 180.0,
}


def run(tool: str, *arguments: object) -> None:
    """Print a command and run it. opreplay-benchmark ends with 1 if an op could not be run: the report lists it."""
    words = [str(each) for each in arguments]
    print(f"$ {shlex.join([f'opreplay-{tool}', *words])}", flush=True)
    code = subprocess.run([sys.executable, "-m", f"opreplay_tools.{tool}", *words], check=False).returncode
    if code not in ((0, 1) if tool == "benchmark" else (0,)):
        sys.exit(f"opreplay-{tool} ended with exit code {code}")


def make_power_log(windows: Path, log: Path, interval_s: float) -> None:
    """A log of power as a logger would have written it while the windows ran: a level for each of them."""
    rows = [json.loads(line) for line in windows.read_text().splitlines()]
    spans = [
        (row["start_utc_ns"] / 1e9, row["end_utc_ns"] / 1e9, WORK_W.get(row["kernel_class"] or row["role"], IDLE_W))
        for row in rows
        if row["kind"] == "window" and row["role"] != "idle"
    ]
    now = min(row["start_utc_ns"] for row in rows if row["kind"] == "window") / 1e9 - 1
    end = spans[-1][1] + 1
    with open(log, "w", encoding="utf-8") as file:
        file.write("timestamp,gpu,power_w\n")
        place = 0
        while now <= end:
            while place < len(spans) and spans[place][1] < now:
                place += 1
            working = place < len(spans) and spans[place][0] <= now
            file.write(f"{now:.6f},0,{spans[place][2] if working else IDLE_W:.1f}\n")
            now += interval_s


def draw(report: dict[str, Any], folder: Path, about: str) -> list[Path]:
    """The whole against the sum of its kernels, by class, and the kernels that take most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (parts, kernels) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(1, 2), layout="constrained")
    whole = report["whole_model"]["joules_per_run"]
    if whole is not None:
        parts.bar("whole model", whole, color="0.5")
    bottom = 0.0
    for name, part in report["by_class"].items():
        parts.bar("isolated kernels", part["joules_per_run"], bottom=bottom, label=name)
        bottom += part["joules_per_run"]
    parts.set_ylabel("joules a run")
    if report["by_class"]:
        parts.legend(fontsize="small")
    measured = [each for each in report["kernels"] if each["joules_per_run"] is not None]
    top = sorted(measured, key=lambda each: each["joules_per_run"])[-12:]
    kernels.barh(range(len(top)), [each["joules_per_run"] for each in top])
    kernels.set_yticks(range(len(top)), [f"{each['count']} x {each['name'][:60]}" for each in top], fontsize="x-small")
    kernels.set_xlabel("joules a run")
    figure.suptitle(about)
    paths = [folder / f"energy.{kind}" for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path)
    plt.close(figure)
    return paths


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    parser.add_argument("--small", action="store_true", help="a toy of the same kind")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    parser.add_argument("--model", type=Path, metavar="FILE", help="TorchScript (.pt) or an exported program (.pt2)")
    parser.add_argument("--recorded", action="store_true", help="make the power log up, even if there is a GPU")
    asked = parser.parse_args(own)

    folder = asked.directory
    folder.mkdir(parents=True, exist_ok=True)
    capture, windows, power = folder / "bloom.opreplay", folder / "windows.jsonl", folder / "power.csv"
    energy, page = folder / "gpu_energy_report.json", folder / "report.html"
    program = [HERE / "bloom_generate.py", f"--tokens={asked.tokens}", *(["--small"] if asked.small else [])]
    program += [f"--model={asked.model}"] if asked.model else []
    run("capture", "--force", "--start-scope=generate", "--stop-scope=generate", "-o", capture, *program)
    made_up = asked.recorded or not torch.cuda.is_available()
    if made_up:
        given = {flag.partition("=")[0] for flag in flags}
        flags = [*(each for each in MADE_UP if each.partition("=")[0] not in given), *flags]
        run("benchmark", "--force", f"--energy-windows={windows}", *flags, capture)
        header = json.loads(windows.read_text().partition("\n")[0])
        make_power_log(windows, power, header["context"]["power_interval_s"])
        run("energy", "--force", windows, power, "-o", energy)
    else:
        run("benchmark", "--force", "--energy", f"--energy-out={energy}", f"--power-log-out={power}", *flags, capture)
    run("report", "--force", f"--energy={energy}", capture, "-o", page)
    report = json.loads(energy.read_text())
    about = "made-up power log, of no device" if made_up else report["power_log"]["source"]
    what = asked.model.name if asked.model else "BLOOM"
    pictures = draw(report, folder, f"{what}, {asked.tokens} tokens: {about}")
    comparison = report["comparison"]
    if comparison["ratio"] is None:
        print(f"not compared: {comparison['reason']}")
    else:
        print(
            f"isolated kernels, times their calls: {comparison['predicted_joules_per_run']:.4g} J; the whole: "
            f"{comparison['whole_joules_per_run']:.4g} J; ratio {comparison['ratio']:.3f}"
            + (" (of a made-up power log)" if made_up else "")
        )
    print("written:", *(path.name for path in (capture, energy, power, page, *pictures)))


if __name__ == "__main__":
    main()
