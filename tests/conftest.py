"""What every test needs of the process it runs in."""

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import workers
from hypothesis import HealthCheck, Phase, settings
from in_process import tools as tools
from in_process import trim_here as trim_here
from served_tools import commands as commands
from served_tools import sooner as sooner

# A shell without job control starts background jobs with SIGINT ignored, and so would be every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is shown on a terminal depends on these, and tests bring terminals of their own.
os.environ["TERM"] = "xterm"
for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Workers that run tests beside each other, and what they start, share the processors. PyTorch reads this when it is
# imported, which is later.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = workers.threads_of_a_worker(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

# The examples of a test are the same in every run, and no duration fails it: neither chance nor a busy machine can.
# An example that fails is shown as it was found, because making it smaller can take minutes, in which the suite's other
# failures are not seen. HYPOTHESIS_PROFILE=random looks for new examples and makes them small; what it finds belongs
# into a test, as an @example or one of its own.
settings.register_profile(
    "repeatable",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
settings.register_profile("random", settings.get_profile("repeatable"), derandomize=False, phases=list(Phase))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """Each collection of garbage, with which a benchmark begins and many a test ends, looks at what came since then:
    not at PyTorch and all the tests again, which takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A capture ends with the test that began it, and gradients are on: a test that fails costs no other one."""
    yield
    recording = sys.modules.get("replayfmt.recording.recorder")  # None: this test has no need of PyTorch
    left = None if recording is None else recording._active
    if left is not None:
        with suppress(Exception):  # what the capture says of itself is not what went wrong
            left.close()
        pytest.fail(f"the test left a capture open: {left.path}")
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("the test left gradients switched off")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist is not everywhere that these tests run
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` is."""
    return workers.workers()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what libraries still hold at the end they take for a leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Documents and benchmarks, which take minutes, begin first: no worker is left with them at the end."""
    items.sort(key=lambda item: "project" not in item.path.parts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The recorder's libraries are built before the first test, so that no test waits for it or sees that said; of
    several workers one builds them. Where they cannot be built, tests that need them are skipped, and no other one says
    so on its stderr. And records are written seldom: tests that change a small capture's records expect one frame of
    them, however busy the machine is."""
    if session.items and not session.config.option.collectonly:
        from replayfmt.native.hook import dispatch_hook
        from replayfmt.native.watching import thread_watch
        from replayfmt.pytorch.tensors.digests import use_native

        with Path(__file__).open() as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            dispatch_hook()
            state = thread_watch("auto").state
            if state == "native":
                use_native()
        if state != "native":
            os.environ["OPREPLAY_NATIVE"] = "off"
            os.environ["OPREPLAY_NATIVE_MISSING"] = state
        from replayfmt.recording.stream import buffer

        buffer._DUE_NS, buffer.PERIOD_NS = 1_600_000_000, 2_000_000_000
