"""The progress bar that tools have in common."""

import io
import sys

import pytest
from opreplay_tools.command import record_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_a_bar_counts_records_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with record_bar("replaying", 20_000) as show:
        assert show is not None
        show(5_000)
    with record_bar("exporting", 20_000) as show:
        assert show is not None
        show(5_000, 10_000)
    assert "replaying" in screen.getvalue() and "5000/20000" in screen.getvalue()
    assert "exporting" in screen.getvalue() and "5000/10000" in screen.getvalue()


def test_there_is_no_bar_for_few_records_or_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with record_bar("replaying", 20_000) as show:
        assert show is None
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with record_bar("replaying", 19_999) as show:
        assert show is None
    assert screen.getvalue() == ""
