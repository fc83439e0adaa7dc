"""A plugin of pytest that writes each test's outcome as a line of JSON once it is known, after a failure's traceback.

pytest itself shows tracebacks only at its end, which a run that is out of time does not reach.
"""

from __future__ import annotations

import json

import pytest

_MOST = 600  # characters of a failure's message


class Outcomes:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report, report.outcome if report.when == "call" or report.skipped else "error", report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, "not collected", 0.0)

    def _write(self, report: pytest.TestReport | pytest.CollectReport, outcome: str, seconds: float) -> None:
        row: dict[str, object] = {"test": report.nodeid, "outcome": outcome, "seconds": round(seconds, 1)}
        text = ""
        if report.failed:
            text = report.longreprtext + "\n"
            crash = getattr(report.longrepr, "reprcrash", None)
            said = f"{crash.path}:{crash.lineno}: {crash.message}"[:_MOST] if crash else report.longreprtext[-_MOST:]
            row["message"] = said
        self._reporter.write(f"\n{text}{json.dumps(row)}\n", flush=True)  # on a line of its own, whatever is before it


@pytest.hookimpl(trylast=True)  # after the reporter was made
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # a worker has none
        config.pluginmanager.register(Outcomes(reporter), "outcomes of tests")
