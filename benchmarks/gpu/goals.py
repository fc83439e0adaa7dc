"""What a check on a GPU measures: every figure, the step that measures it, and its goal where it has one.

A step tells a figure by its name here. What no step tells becomes a row, too, which says that it was not measured, and
why: no figure is silently absent.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = ("GPT-2 training", "GPT-2 decoding", "Llama training", "Llama decoding")
STREAM_CASES = (
    "two streams and events",
    "memory kept for another stream (record_stream)",
    "copies to and from pinned memory",
    "a CUDA graph",
    "a CUDA graph in a pool that another one shares",
    "make_graphed_callables",
)
PROBED = ("relu", "add", "matmul")
PROBES = ("block_sched", "dmat", "gmem_bytes")
YES = "(1: yes)"


@dataclass(frozen=True)
class Figure:
    """`what` is measured by `step`, in `unit`; the goal is between `at_least` and `at_most`, where these are given."""

    step: str
    what: str
    unit: str = "×"
    at_most: float | None = None
    at_least: float | None = None

    def row(self, measured: float | None, details: dict[str, object]) -> dict[str, object]:
        """In the form of the other benchmarks' rows, with a `verdict`."""
        verdict, met = "no goal", None
        if measured is None:
            verdict = "not measured"
        elif self.at_most is not None or self.at_least is not None:
            met = (self.at_most is None or measured <= self.at_most) and (
                self.at_least is None or measured >= self.at_least
            )
            verdict = "met" if met else "missed"
        return {
            "what": self.what,
            "measured": measured,
            "unit": self.unit,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": met,
            "verdict": verdict,
            "details": details,
        }


def _yes(step: str, what: str) -> Figure:
    return Figure(step, what, YES, at_least=1)


def _figures() -> list[Figure]:
    found = [
        _yes("machine", "a capture of the host's work leaves the device alone"),
        _yes("machine", "the native recorder is there"),
        _yes("machine", "digests of a device's content are those of the host's"),
        Figure("machine", "hashing 256 MiB of a device: time / copying it to the host"),
        Figure("machine", "the digest of 256 MiB of a device: time / copying it to the host"),
    ]
    for name in PROGRAMS:
        training = name.endswith("training")
        found += [
            Figure(
                "capture", f"capture, {name}: added time / no-op TorchDispatchMode's", at_most=0.5 if training else 0.35
            ),
            Figure("capture", f"capture, {name}: added time / ExecutionTraceObserver's", at_most=0.08),
            Figure("capture", f"capture, {name}: added for an op", "us"),
            Figure("capture", f"capture, {name}: time of a step / without a capture"),
            _yes("capture", f"capture, {name}: same bits with a capture as without"),
        ]
        found += [
            _yes("replay", f"replay, {name}: nothing differs from the capture"),
            Figure("replay", f"replay, {name}: kernels that differ from run to run", "kernels"),
            Figure("replay", f"replay, {name}: wall time / the program's", at_most=None if training else 1.0),
            Figure("replay", f"replay, {name}: device time / the program's", at_most=1.01 if training else None),
            Figure("replay", f"replay, {name}: device time of one graph / of the program"),
            Figure("replay", f"replay, {name}: peak memory / the program's", at_most=1.05),
        ]
    found += [
        Figure(
            "verification", "verification, digests=live, a scope for each step: step / without digests", at_most=1.03
        ),
        Figure("verification", "verification, digests=ops, batch of 4: step / without a capture", at_most=2.0),
    ]
    for name in ("float32", "bfloat16"):
        found += [
            _yes("verification", f"verification, attention in {name}: nothing differs"),
            Figure(
                "verification", f"verification, attention in {name}: kernels that differ from run to run", "kernels"
            ),
        ]
    for inputs in ("hot", "cold", "in graphs"):
        goal = {"at_least": 0.9, "at_most": 1.1} if inputs == "hot" else {}
        found.append(Figure("per_op", f"per op, {inputs}: sum / device time of the whole", **goal))
    found += [
        Figure(
            "per_op",
            "per op: of the five kernels that torch.profiler finds most expensive, found too",
            "of 5",
            at_least=5,
        ),
        Figure("per_op", "per op: ops whose times hold waiting for the host", "ops"),
        Figure("per_op", "roofline, cold: the largest share of a roof", at_most=1.05),
    ]
    for name in ("default, from binaries", "default, from source", "max-autotune", "CUDA graph trees"):
        found.append(_yes("compiled", f"compiled, {name}: replays as captured"))
    for what in (
        "replays bit for bit",
        "a right replacement is accepted",
        "a wrong replacement is rejected",
        "a right cubin is accepted",
        "a wrong cubin is rejected",
        "--autotune=again replays as captured",
        "its task's judge accepts what is right and rejects what is wrong",
    ):
        found.append(_yes("triton", f"Triton program: {what}"))
    found += [
        _yes("triton", f"--guard: {what}") for what in ("a right kernel is not blamed", "a write beside is found")
    ]
    found += [_yes("streams", f"streams, {case}: replays as captured") for case in STREAM_CASES]
    found += [_yes("ranks", f"one rank, {how}: replays as captured") for how in ("alone", "by torchrun")]
    found.append(_yes("ranks", "per op, shared out to two processes: each measures a part"))
    found += [
        _yes("tests", "tests marked gpu: all are collected"),
        Figure("tests", "tests marked gpu: passed, of those that ran", at_least=1),
    ]
    found += [
        _yes("probes", f"probe {probe} on {kernel}: same results, records as calculated")
        for kernel in PROBED
        for probe in PROBES
    ]
    found += [
        Figure("energy", "energy: counter / integral of power", at_least=0.95, at_most=1.05),
        Figure("energy", "energy: sum of the kernels / whole", at_least=0.9, at_most=1.1),
    ]
    return found


FIGURES = {figure.what: figure for figure in _figures()}
# In priority order, with limits in seconds: what was not reached when the time is up matters least.
STEPS = {
    "machine": 120,  # a few seconds, unless the recorder in C++ has to be built
    "capture": 60,
    "replay": 90,
    "verification": 50,
    "per_op": 75,
    "streams": 30,
    "probes": 20,
    "energy": 65,
    "triton": 60,
    "compiled": 75,
    "ranks": 60,
    "tests": 150,
}
