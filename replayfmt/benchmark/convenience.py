"""A benchmark in one call: what `replayfmt.benchmark(...)` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.format.keywords import explained
from replayfmt.format.validation import choice_of, flag_of, text_of, texts_of
from replayfmt.replay.convenience import frame_of
from replayfmt.replay.plan import Plan
from replayfmt.replay.preparation import PlanOptions, ReplayOptions
from replayfmt.replay.results import VerifyMode

from .measure import INPUTS, Inputs, Options, measure
from .run_report import Report, make_report
from .statistics import parse_min_time, whole_precision

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Benchmarked:
    """A finished benchmark whose verifications passed. `rows` follow Google Benchmark's schema, times in nanoseconds;
    `context` describes machine, capture and settings. Prints as opreplay-benchmark's table."""

    report: Report

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each region and repetition, then the aggregates over repetitions."""
        return self.report.rows

    @property
    def context(self) -> dict[str, Any]:
        return self.report.context

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the figures."""
        return self.report.warnings()

    @property
    def median_ns(self) -> float:
        """The median real time of the first region's first repetition, in nanoseconds. Raises ReplayFailed if it could
        not be measured."""
        first = self.rows[0]
        if "unmeasurable" in first:
            raise ReplayFailed(f"{first['name']}: unmeasurable: {first['unmeasurable']}")
        return float(first["median_real_time"])

    def json(self) -> str:
        """Google Benchmark's JSON document."""
        return self.report.json()

    def csv(self) -> str:
        """Google Benchmark's columns, then one for each counter."""
        return self.report.csv()

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each of `rows`. Raises LibraryMissing without pandas."""
        return frame_of(self.rows)

    def __str__(self) -> str:
        return str(self.report)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@explained(PlanOptions, ReplayOptions)
def benchmark(
    path: str | PathLike[str],
    *,
    scopes: Sequence[str] = (),
    min_time: str = "0.5s",
    repetitions: int = 1,
    warmup: int = 2,
    verify: VerifyMode = "auto",
    precision: str | None = None,
    max_time: str | None = None,
    inputs: Inputs = "hot",
    cuda_graph: bool = False,
    **options: Unpack[PlanOptions],
) -> Benchmarked:
    """Replay a capture repeatedly and measure it, as opreplay-benchmark does: verified before and after timing.

    `scopes` (names, or full paths) measures the time inside them instead of the whole replay's; `min_time` is a number
    of replays (`20x`) or of timed seconds (`0.5s`); `warmup` counts untimed replays before each repetition. Replays go
    on until the median is known to `precision` (`2%`, the default if `min_time` is in seconds; `off`), for at most
    `max_time`. `inputs` are `hot` or `cold`, as with --inputs. With `cuda_graph` the whole replay is launched as one
    graph of the device, as with --cuda-graph. `options` are those of Plan. Raises ReplayMismatch if a replay differs
    from the capture, UsageError for a device without graphs, and the errors of Plan.
    """
    cuda_graph = flag_of("cuda_graph", cuda_graph)
    if cuda_graph and scopes:
        raise UsageError(
            "benchmark(cuda_graph=True) measures the whole replay: for graphs of scopes use opreplay-benchmark "
            "--cuda-graph --scope=NAME, or leave out scopes"
        )
    floor = parse_min_time(text_of("min_time", min_time))
    choice_of("inputs", inputs, INPUTS)
    texts = {"precision": precision, "max_time": max_time}
    given = {name: None if value is None else text_of(name, value) for name, value in texts.items()}
    asked = Options(
        floor,
        repetitions,
        warmup,
        verify,
        texts_of("scopes", scopes),
        whole_precision(given["precision"], given["max_time"], floor),
        inputs,
        cuda_graph,
    )
    with Plan(path, **options) as plan:
        return Benchmarked(make_report(measure(plan, asked), plan))
