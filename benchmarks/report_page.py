"""The HTML report of a capture of 200,000 ops: the time and memory that making it takes, and how long a browser takes
to open it, from the request until tables and pictures are there.

Each is a process of its own: a start of Python or of Chromium is in the first two figures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from measuring import arguments, progress, row, scratch

import replayfmt

SCOPES, OPS_IN_A_SCOPE = 500, 400
# Says its own peak at the end, in kB, on stderr: the tool's stdout has its own lines.
REPORT = """
import atexit, sys
from opreplay_tools.report import main
atexit.register(lambda: print(*(line for line in open("/proc/self/status") if "VmHWM" in line), file=sys.stderr))
main()
"""


def captured(path: Path, scopes: int) -> int:
    """Scopes of 400 ops of four kernels each; returns how many ops there are."""
    ones = torch.ones(8, 8)
    with replayfmt.capture(path, digests="none"):
        for _ in range(scopes):
            with replayfmt.scope("step"), replayfmt.scope("forward"):
                for _ in range(OPS_IN_A_SCOPE // 4):
                    torch.mm(ones, ones).add(1.0).relu().view(64)
    return scopes * OPS_IN_A_SCOPE


def opening_seconds(page: Path) -> tuple[float, float] | None:
    """Seconds until the page is ready in a Chromium that has just been started, and the processor time of its main
    thread until then, which other programs on the machine do not add to; None where there is no Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        return None
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        begin = time.perf_counter()
        browser.get(page.as_uri())
        while not browser.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return seconds, {each["name"]: each["value"] for each in metrics}["TaskDuration"]
    finally:
        browser.quit()


def main() -> None:
    quick = arguments(__doc__).quick
    with scratch() as directory:
        capture, page = directory / "many.opreplay", directory / "report.html"
        progress("capturing")
        ops = captured(capture, 5 if quick else SCOPES)
        progress("making the report")
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", REPORT, str(capture), "-o", str(page)], check=True, text=True, capture_output=True
        )
        made = time.perf_counter() - begin
        peak = int(done.stderr.partition("VmHWM:")[2].split()[0]) / 1024
        what = f"report of {ops:,} ops"
        row(f"{what}: making it", made, "s", at_most=20, page_bytes=page.stat().st_size)
        row(f"{what}: peak memory", peak, "MiB", at_most=1024)
        progress("opening it")
        opened = opening_seconds(page)
        if opened is not None:
            seconds, processor_s = opened
            row(f"{what}: opening it in Chromium", seconds, "s", at_most=3, processor_s=processor_s)


if __name__ == "__main__":
    main()
