"""Operators in threads that never enter Python: they are told, and nothing else is taken for them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import replayfmt
from replayfmt.errors import NothingCaptured, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.native import building, watching
from replayfmt.replay.plan import Plan

from .conftest import Capture, Captured

STATE = watching.thread_watch("auto").state
watched = pytest.mark.skipif(STATE != "native", reason=f"the recorder's library cannot be built here ({STATE})")
pytestmark = pytest.mark.filterwarnings("ignore")

EXTENSION = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

namespace {
void work(int layers) {
  auto x = at::ones({3, 3});
  for (int layer = 0; layer < layers; layer++) {
    x = at::linear(x, x);
  }
}

std::mutex mutex;
std::condition_variable changed;
int asked = 0, done = 0;
std::thread server;
}

extern "C" {
void run_in_thread(int layers) {
  std::thread thread([layers] {
    pthread_setname_np(pthread_self(), "of-c-code");
    work(layers);
  });
  thread.join();
}

void run_in_pool() {
  std::promise<void> finished;
  at::launch([&finished] {
    work(1);
    finished.set_value();
  });
  finished.get_future().wait();
}

void run_in_pool_for_thread() { std::thread(run_in_pool).join(); }

void start_server() {
  asked = done = 0;
  server = std::thread([] {
    pthread_setname_np(pthread_self(), "server");
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [] { return asked != done; });
      if (asked < 0) return;
      work(1);
      done = asked;
      changed.notify_all();
    }
  });
}

void ask_server() {
  std::unique_lock<std::mutex> lock(mutex);
  asked++;
  changed.notify_all();
  changed.wait(lock, [] { return asked == done; });
}

void stop_server() {
  { std::lock_guard<std::mutex> lock(mutex); asked = -1; }
  changed.notify_all();
  server.join();
}

void run_without_keys() {
  const c10::impl::ForceDispatchKeyGuard guard(c10::default_included_set, c10::default_excluded_set);
  work(1);
}

void run_in_parallel() {
  at::parallel_for(0, 8, 1, [](int64_t begin, int64_t end) {
    for (; begin < end; begin++) work(1);
  });
}
}
"""


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """C code that runs operators in threads of its own."""
    directory = tmp_path_factory.mktemp("extension")
    (directory / "threads.cpp").write_text(EXTENSION)
    building.compile_library(
        directory / "threads.cpp", directory / "threads.so", "-O0", "-fopenmp", "-fvisibility=default"
    )
    return ctypes.CDLL(str(directory / "threads.so"))


def told(captured: Captured) -> list[tuple[Any, Any]]:
    """The first operator and the sentence of every thread that was told."""
    return [
        (record.argument("op"), record.argument("detail"))
        for record in captured.records(RecordKind.unsupported)
        if record.argument("reason") != "child_work"
    ]


# ------------------------------------------------------------------------------------------------------ what is told


@pytest.mark.slow
@watched
def test_a_thread_of_c_code_is_told_and_a_strict_replay_refuses(capture: Capture, extension: ctypes.CDLL) -> None:
    captured = capture(lambda: (torch.ones(3).sin(), extension.run_in_thread(4)))
    assert captured.ops() == ["aten::ones.default", "aten::sin.default"]
    ((first, sentence),) = told(captured)
    assert captured.unsupported() == {"unseen_thread": 1} and first == "aten::ones"
    assert sentence.startswith("the thread of-c-code (id ") and "ran 5 operators" in sentence, "not what is inside"
    with pytest.raises(ReplayRefused) as refused:
        Plan(captured.path)
    assert any("of-c-code" in finding for finding in refused.value.findings)
    assert captured.reader.session.policies["thread-watch"] == "native"


@pytest.mark.slow
@watched
def test_a_server_that_began_before_the_capture_is_told_scope_by_scope(
    capture: Capture, extension: ctypes.CDLL
) -> None:
    def program() -> None:
        for _ in range(2):
            with replayfmt.scope("step"):
                torch.ones(2)
                extension.ask_server()
        torch.ones(2)

    extension.start_server()
    try:
        extension.ask_server()
        captured = capture(program)
        again = capture(lambda: torch.ones(2))
    finally:
        extension.stop_server()
    assert captured.unsupported() == {"unseen_thread": 2}
    assert all("server" in sentence and "2 operators" in sentence for _first, sentence in told(captured))
    kinds = [record.kind for record in captured.records(RecordKind.scope_end, RecordKind.unsupported)]
    assert kinds == [RecordKind.scope_end, RecordKind.unsupported] * 2
    assert again.unsupported() == {}, "nothing is left of a former capture"


@watched
@pytest.mark.parametrize("times", [1, 2000])
def test_work_with_dispatch_keys_that_leave_the_recorder_out_is_told(
    capture: Capture, extension: ctypes.CDLL, times: int
) -> None:
    """Once after an operator that is new to the capture, or often after known ones."""

    def program() -> None:
        x = torch.ones(3)
        for _ in range(100 if times > 1 else 0):
            x.sin()
        for _ in range(times):
            x.sin()
            extension.run_without_keys()

    captured = capture(program)
    ((first, sentence),) = told(captured)
    assert captured.unsupported() == {"unseen_work": 1} and first == "aten::ones"
    assert "with dispatch keys that leave the recorder out" in sentence


@watched
def test_where_only_such_threads_work_the_capture_says_so(tmp_path: Path, extension: ctypes.CDLL) -> None:
    path = tmp_path / "unseen.opreplay"
    with pytest.raises(NothingCaptured, match="no op was captured; the file was kept"), replayfmt.capture(path):
        extension.run_in_thread(1)
    assert replayfmt.open(path).reader.summary.unsupported == {"unseen_thread": 1}


@watched
def test_pytorchs_own_pool_is_told_where_an_unseen_thread_gave_it_the_work(
    capture: Capture, extension: ctypes.CDLL
) -> None:
    captured = capture(lambda: (torch.ones(2), extension.run_in_pool_for_thread()))
    ((first, sentence),) = told(captured)
    assert first == "aten::ones" and "ran 2 operators" in sentence


@watched
def test_pytorchs_own_pool_is_recorded_where_a_thread_of_python_gave_it_the_work(
    capture: Capture, extension: ctypes.CDLL
) -> None:
    captured = capture(lambda: (torch.ones(2), extension.run_in_pool()))
    assert captured.unsupported() == {}
    assert captured.ops()[:2] == ["aten::ones.default"] * 2 and len(captured.ops()) > 2


@watched
def test_a_parallel_region_outside_of_any_operator_is_told(capture: Capture, extension: ctypes.CDLL) -> None:
    torch.set_num_threads(4)
    captured = capture(lambda: (torch.ones(2), extension.run_in_parallel()))
    assert set(captured.unsupported()) == {"unseen_thread"}
    assert all(first == "aten::ones" for first, _sentence in told(captured))


@watched
def test_what_ran_before_recording_began_is_not_told(capture: Capture, extension: ctypes.CDLL) -> None:
    def program() -> None:
        extension.run_in_thread(1)
        with replayfmt.scope("execute"):
            torch.ones(2)

    assert capture(program, start_scope="execute").unsupported() == {}
    assert capture(program).unsupported() == {"unseen_thread": 1}


@watched
@pytest.mark.recorder("python")
def test_off_counts_nothing_and_the_session_says_so(capture: Capture, extension: ctypes.CDLL) -> None:
    captured = capture(lambda: (torch.ones(2), extension.run_in_thread(1)), native="off")
    assert captured.unsupported() == {}
    assert captured.reader.session.policies["thread-watch"] == "off"


@pytest.mark.recorder("python")
def test_the_environment_turns_it_off_and_wrong_words_are_refused(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPREPLAY_NATIVE", "off")
    assert capture(lambda: torch.ones(2)).reader.session.policies["thread-watch"] == "off"
    monkeypatch.setenv("OPREPLAY_NATIVE", "yes")
    with pytest.raises(UsageError, match="native='yes': expected one of auto, off"):
        capture(lambda: torch.ones(2))


# -------------------------------------------------------------------------------------------------- no false alarms


def _backward() -> Any:
    layers = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    x = torch.ones(2, 2, 8, 8, requires_grad=True)
    checkpoint(layers, x, use_reentrant=False).sum().backward()
    checkpoint(layers, x, use_reentrant=True).sum().backward()
    return x.grad


def _forks() -> Any:
    return torch.jit.script(_fork_and_wait)(torch.ones(2))


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x) * 2


def _fork_and_wait(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(_negated, x)) + x


def _kernels_of_many_threads() -> Any:
    x = torch.ones(4, 3, 16, 16, 16, dtype=torch.float64, requires_grad=True)
    w = torch.ones(5, 3, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv3d(x, w, dilation=2) + torch.nn.functional.conv3d(x, w)[..., :12, :12, :12]
    z = torch.nn.functional.conv_transpose2d(x[:, :, 0], w[:, :, 0].transpose(0, 1))
    bag = torch.nn.functional.embedding_bag(torch.arange(4000) % 90, torch.ones(90, 64), torch.arange(0, 4000, 4))
    q = torch.ones(2, 4, 64, 16, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    solved = torch.linalg.solve(torch.eye(8).expand(64, 8, 8), torch.ones(64, 8, 2))
    unfolded = torch.nn.functional.unfold(torch.ones(8, 3, 32, 32), 3)
    (y.sum() + z.sum() + attention.sum()).backward()
    return x.grad, w.grad, q.grad, bag, solved, unfolded


def _data_loader() -> Any:
    return [batch.sin() for batch in torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=1)]


def _python_threads() -> Any:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: torch.ones(number).sin(), [1, 2, 3]))


@pytest.mark.slow
@watched
@pytest.mark.parametrize("program", [_backward, _forks, _kernels_of_many_threads, _data_loader, _python_threads])
def test_what_is_recorded_is_never_told_as_unseen(capture: Capture, program: Callable[[], Any]) -> None:
    torch.set_num_threads(4)
    captured = capture(program)
    assert told(captured) == []
    assert captured.ops()


@watched
def test_the_recorders_own_threads_are_none_of_those(capture: Capture, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "w.pt")
    captured = capture(
        lambda: torch.load(tmp_path / "w.pt")["w"].sin(),
        digests="ops",
        files=[tmp_path / "w.pt"],
        file_validation="digest",
    )
    assert captured.unsupported() == {}


@watched
def test_what_collectives_do_in_threads_of_their_own_is_known(capture: Capture, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

        def program() -> None:
            for _ in range(2):
                layer(torch.ones(2, 4)).sum().backward()
            x = torch.ones(3)
            torch.distributed.all_reduce(x)
            torch.distributed.broadcast(x, 0)
            torch.distributed.all_gather_into_tensor(torch.ones(3), x)

        assert not capture(program).unsupported()
    finally:
        torch.distributed.destroy_process_group()


@watched
def test_a_forked_child_counts_nothing_and_can_capture(extension: ctypes.CDLL, tmp_path: Path) -> None:
    path = tmp_path / "child.opreplay"
    with replayfmt.capture(tmp_path / "parent.opreplay"):
        torch.ones(2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with replayfmt.capture(path):
                    torch.ones(2)
                    extension.run_in_thread(1)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert replayfmt.open(path).reader.summary.unsupported == {"unseen_thread": 1}
    assert replayfmt.open(tmp_path / "parent.opreplay").reader.summary.unsupported == {}
