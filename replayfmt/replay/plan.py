"""A capture prepared once for a group of devices, then run any number of times.

Making a plan refuses with every finding at once. Running it lowers the records to windows of code (kept between runs
unless the capture is very long), provides fresh content and issues the ops again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal, Unpack

from replayfmt.errors import ReplayFailed, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import tensors_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.source import Closing
from replayfmt.format.validation import check_function, check_kind, choice_of, counted, flag_of
from replayfmt.pytorch.accelerators import undrawn
from replayfmt.pytorch.collectives import plays_ranks
from replayfmt.pytorch.environment import apply_settings, set_up_vector_math

from .codegen.call_templates import DirectFunctions, TemplateMaker
from .codegen.lowering import Context, Lowering, Shapes
from .codegen.op_lowering import Watcher, lower_op, lower_watched
from .codegen.streams import replay_streams
from .codegen.windows import CodeCache, Window
from .planning.devices import MemoryWatch
from .planning.kernels import KernelStandIn
from .planning.records import Slice, describe
from .planning.scan import Scan
from .preparation import MorePlanOptions, Preparation, ReplayOptions
from .results import VERIFY_MODES, Divergence, OpVerdict, PeakMemory, ReplayResult, Verification, VerifyMode
from .run.checkpoints import Checkpoints
from .run.content import Content, Restoring
from .run.execute import Machine, OnScope, RunClock, ScopeTimes, Timer, surroundings
from .run.run_twice import NondeterministicOp, RunTwice, name_nondeterministic
from .run.steps import ONE_RECORD, IsolatedOp, KeepGoing, Steps
from .substitution.session import SubstitutionSession, python_dispatch
from .verification import Judge, Notes, NotingJudge, StopReplay, decide, environment_differences

_KEPT_RECORDS = 250_000  # longer captures do not keep their windows between runs, at some hundred bytes a record
_PATIENCE_S = 60.0  # for the search for ops whose results differ from run to run, or
_PATIENCE_RUNS = 10  # as long as that many replays take
_MORE_REPEATS = 32  # of each op, if running it twice did not explain a difference: some ops seldom differ


class Plan(Closing):
    """A capture that is ready to run on `devices`.

    `capture` is a path, an open reader or a `replayfmt.open(...)` capture; a path is opened here and closed by `close`.
    `findings` are the reasons against a strict replay: empty, unless the plan was made with `keep_going`.
    """

    def __init__(
        self,
        capture: str | PathLike[str] | CaptureReader | Any,
        devices: Sequence[str] = (),
        allow_incomplete: bool = False,
        *,
        keep_going: bool = False,
        on_file_bytes: Callable[[int, int], None] | None = None,
        **options: Unpack[MorePlanOptions],
    ) -> None:
        """`devices`, `allow_incomplete`, `keep_going` and `options` are fields of ReplayOptions. While the digests of
        external files are computed, `on_file_bytes(bytes read, of all)` is called, from any thread.

        Raises ReplayRefused with `findings`, UsageError for wrong devices and remaps, and what opening a file raises.
        """
        check_function("on_file_bytes", on_file_bytes)
        asked = ReplayOptions(devices, allow_incomplete, keep_going, **options)
        set_up_vector_math()
        self.preparation = prepared = Preparation(capture, asked, on_file_bytes)
        self.options, self.reader, self.findings = asked, prepared.reader, prepared.findings
        self.device_map, self.generators = prepared.device_map, prepared.generators
        self.kernels, self.synthesis = prepared.kernels, prepared.synthesis
        self.devices = prepared.devices
        self._clock = RunClock()
        self._describe = partial(describe, self.reader)
        self.judge = Judge(self._clock, self._describe)
        self.judge.compares_scalars = not self.synthesis.reason
        self._content = Content(self.reader, prepared.scan(checks=False), prepared.files, self.synthesis)
        usable = tuple(None if isinstance(kernel, str) else kernel for kernel in self.kernels)
        self.context = Context(
            self.reader,
            self.device_map,
            self.generators,
            usable,
            TemplateMaker(self.device_map, self.generators),
            self._clock,
            self.judge,
            CodeCache(),
            prepared.refused,
            DirectFunctions(),
            self._content.load,
            self.device_map.host_goes_to,
            opaque=prepared.opaque_slots(),
            streams=replay_streams(self.reader, self.device_map, asked.streams),
        )
        self._kept: dict[tuple[bool, Shapes, KernelStandIn | None], list[Window]] = {}
        self._shapes_checked, self._executions = False, 0
        self._unsteady: dict[int, NondeterministicOp] = {}  # nondeterministic ops found so far, by ordinal
        self._searched = 0  # before this ordinal every op was run twice
        self._differences: list[str] | None = None
        self.substitution: SubstitutionSession | None = None
        retune = asked.autotune == "again"
        if prepared.replacements or (retune and not prepared.findings):
            try:
                self.substitution = SubstitutionSession(
                    self, prepared.replacements, asked.substitution_tolerance, retune=retune
                )
            except BaseException:
                self.close()
                raise
            self.context = replace(self.context, stand_in=self.substitution.table)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know about how the capture is replayed."""
        return self.preparation.notes

    def windows(self, *, checks: bool, shapes: Shapes = Shapes.unchecked) -> tuple[Iterable[Window], bool]:
        """The windows, and whether all of them are prepared already."""
        key = (checks, shapes, self.context.stand_in)
        if key not in self._kept:
            context = replace(self.context, shapes=shapes)
            lowered = Lowering(context, self.preparation.scan(checks=checks), compare=checks).windows(lower_op)
            if self.reader.record_count > _KEPT_RECORDS:
                return lowered, False
            self._kept[key] = list(lowered)
        return self._kept[key], True

    def differences(self) -> list[str]:
        """Why bitwise equality is not to be expected here. Asked for under the capture's settings."""
        if self._differences is None:
            self._differences = environment_differences(self.reader, self.device_map)
        stand_in = self.context.stand_in
        return self._differences if stand_in is None else [stand_in.reason, *self._differences]

    def execute(
        self,
        verify: VerifyMode = "none",
        on_scope: OnScope | None = None,
        keep_going: bool = False,
        *,
        timer: Timer | None = None,
        on_progress: Callable[[int], None] | None = None,
        scope_times: bool = False,
        only: Slice | None = None,
    ) -> ReplayResult:
        """Run every op once, from fresh state. What no op is known to write is prepared once for the plan; that it
        stays as it was is checked before and after each execution that verifies, and before the second in any case.

        `on_scope(event, name, path, ordinal)` is called at each scope record, inside the timed region; `timer` runs
        exactly while ops do; `on_progress(records done)` is called between windows. With `scope_times` the result
        holds the time spent in each scope. With `keep_going` (the plan must be made with it too) every op gets a
        verdict instead of the first failure ending the run; `only` a slice of the capture may be run that way.

        Raises ReplayFailed if an op fails, ReplayRefused if `bitwise` has nothing to compare, and
        SubstitutionRejected if a substituted kernel is wrong: every call is judged before the first run, and again
        after each that verifies.
        """
        choice_of("verify", verify, VERIFY_MODES)
        keep_going, scope_times = flag_of("keep_going", keep_going), flag_of("scope_times", scope_times)
        check_function("on_scope", on_scope)
        check_function("on_progress", on_progress)
        check_kind("only", only, Slice, optional=True)
        check_kind("timer", timer, Timer, optional=True)
        if keep_going and not self.options.keep_going:
            raise UsageError("keep_going needs a plan made with keep_going=True")
        if only is not None and not keep_going:
            raise UsageError("a slice is run with keep_going")
        if self.findings and not keep_going:
            raise ReplayRefused(f"{self.reader.path}: this plan only keeps going", self.findings)
        if self.substitution is not None:
            self.substitution.check(on_progress)
        if self.synthesis.reason and not keep_going and not self._shapes_checked and verify == "none":
            # Once, untimed: content that is not the captured one may make results of other sizes.
            result = self._run("auto", None, False, None, on_progress, False)
            if result.divergence is not None:
                return result
        result = self._run(verify, on_scope, keep_going, timer, on_progress, scope_times, only)
        if self.substitution is not None and verify != "none" and result.divergence is None:
            self.substitution.check(on_progress, again=True)  # digests only sample what kernels do by now
        return result

    def run_with(
        self,
        stand_in: KernelStandIn | None,
        on_progress: Callable[[int], None] | None = None,
        *,
        on_scope: OnScope | None = None,
        timer: Timer | None = None,
        keep: bool = False,
        verify: VerifyMode = "none",
    ) -> ReplayResult:
        """A run with something else in place of kernels (None: with the captured ones alone); with `keep` its code is
        kept for the next run with it."""
        before, self.context = self.context, replace(self.context, stand_in=stand_in)
        try:
            return self._run(verify, on_scope, self.options.keep_going, timer, on_progress, False)
        finally:
            self.context = before
            if not keep:
                for key in [key for key in self._kept if key[2] is stand_in]:
                    del self._kept[key]

    def _run(
        self,
        verify: VerifyMode,
        on_scope: OnScope | None,
        keep_going: bool,
        timer: Timer | None,
        on_progress: Callable[[int], None] | None,
        scope_times: bool,
        only: Slice | None = None,
        repeats: bool = True,
    ) -> ReplayResult:
        """`repeats`: whether a replay that differs is done again, to see if it differs then."""
        self.preparation.files.check()
        self._executions += 1
        times = ScopeTimes(self._clock, on_scope) if scope_times else None
        with ExitStack() as stack:
            stack.enter_context(self._surroundings())
            if self.context.streams is not None:
                stack.callback(self.context.streams.begin())
            verification = self._decide(verify, only)
            bitwise, tolerant = self._is_bitwise(verification), verify != "bitwise"
            self.judge.reset(verification, bitwise=bitwise, stop_at_first=not keep_going, tolerant=tolerant)
            self._clock.reset(self.devices, timer)
            watch = MemoryWatch(self.devices)
            machine = self._machine(verified=verification.mode != "none")
            callback = times or on_scope
            kept_going = None
            if keep_going:
                watch.start()
                kept_going = self._keep_going(machine, verification.mode != "none", callback, only=only)
            else:
                windows, prepared = self.windows(checks=verification.mode != "none", shapes=self._shapes(verify))
                watch.start()
                with suppress(StopReplay):
                    machine.run(windows, callback, on_progress, prepared=prepared)
            self.preparation.files.check()
            memory = watch.read()
            if verification.mode != "none" and not self.judge.found:
                with suppress(StopReplay):
                    self._content.end_verified(self.judge)
            result = self._result(verification, memory, times, kept_going, whole=only is None)
            self._shapes_checked = result.divergence is None and self._shapes(verify) is Shapes.all
            gaps: tuple[str, ...] = ()
            repeats = repeats and (bitwise or verification.mode != "none") and not plays_ranks()
            if result.divergence is not None and repeats:
                stop = max(each.seen_at for each in self.judge.found) + 1
                learned, gaps = self._explain(stop, tolerant=tolerant and bitwise)
                if learned:  # once more: what differs may be what cannot be compared, or only within tolerances
                    stack.close()
                    return self._run(verify, on_scope, keep_going, timer, on_progress, scope_times, only)
        if result.divergence is not None:
            repeats = repeats and self.context.stand_in is None
            found_again = self._again(result.divergence, verify, keep_going, only) if repeats else None
            result.divergence = replace(self._with_writer(result.divergence), again=found_again)
        found = name_nondeterministic(self._unsteady.values(), self._describe)
        result.nondeterministic = (*found, *gaps) if kept_going is None else found
        self._tell_tolerance(verification)
        return result

    def _again(
        self, first: Divergence, verify: VerifyMode, keep_going: bool, only: Slice | None
    ) -> Literal["agrees", "differs in the same way", "differs otherwise", "fails"]:
        """What a second replay does where the first one differed."""
        executions = self._executions
        try:
            second = self._run(verify, None, keep_going, None, None, False, only, repeats=False).divergence
        except ReplayFailed:
            return "fails"
        finally:
            self._executions = executions
        if second is None or second.seen_at > first.seen_at:
            return "agrees"
        same = (second.ordinal, second.got) == (first.ordinal, first.got)
        return "differs in the same way" if same else "differs otherwise"

    def _with_writer(self, found: Divergence) -> Divergence:
        """A difference that no op's tensor showed, with the op that wrote what differs."""
        record = self.reader.record(found.ordinal)
        told = self.reader.session.policies.get("digests") == "ops" or any(tensors_of(record.results))
        if record.kind is RecordKind.op and told:
            return found
        writer = self.preparation.last_writer(found.ordinal)
        return found if writer is None else replace(found, written_by=writer, writer=self._describe(writer)[0])

    def _explain(self, stop: int, *, tolerant: bool) -> tuple[bool, tuple[str, ...]]:
        """Run the ops before an ordinal twice, or more often; whether that explains a difference, and what the search
        did not reach."""
        twice = self._run_twice(stop)
        learned, unsteady = self.learn(twice), self._learn_unsteady(twice)
        if not (learned or unsteady or twice.given_up):
            twice = self._run_twice(stop, repeats=_MORE_REPEATS)
            learned, unsteady = self.learn(twice), self._learn_unsteady(twice)
        return learned or (tolerant and unsteady), tuple(filter(None, (twice.given_up, twice.left_out)))

    def _learn_unsteady(self, twice: RunTwice) -> bool:
        """Whether a search found nondeterministic ops that were not known."""
        new = twice.unsteady.keys() - self._unsteady.keys()
        if new:
            self._unsteady |= twice.unsteady
            self.context = replace(self.context, unsteady=frozenset(self._unsteady))
            self._kept.clear()
        return bool(new)

    def _tell_tolerance(self, verification: Verification) -> None:
        """State that what depends on nondeterministic ops was not equal bit for bit, if it was not."""
        if self._unsteady and verification.mode == "bitwise" and verification.inexact:
            verification.mode = "close"
            verification.reasons = (self._why_tolerant(),)

    def _why_tolerant(self) -> str:
        ops = counted(len(self._unsteady), "nondeterministic op")
        return f"{ops}: what depends on them is compared within tolerances, everything else bit for bit"

    def why_not_bitwise(self) -> list[str]:
        """Why what a replay computes here need not be what was captured, as far as known; empty if it should be."""
        return [*self.differences(), *([self._why_tolerant()] if self._unsteady else [])]

    def restoring(self) -> Restoring:
        """What executions do to put content in place, to do it alone."""
        return Restoring(self._content, self.windows(checks=False)[0], self._surroundings)

    def explain(self, stop: int, verify: VerifyMode) -> bool:
        """Whether running the ops before an ordinal twice shows results that must not be compared as they were so far:
        not at all, as they hold bytes no replay reproduces, or only within tolerances."""
        with self._surroundings():
            return self._explain(stop, tolerant=verify != "bitwise" and not self.differences())[0]

    def may_be_taken(self, twice: RunTwice | None, divergence: Divergence | None, verify: VerifyMode) -> bool:
        """Whether content may be taken from a replay that was watched, with what it found. False: it showed results
        that must not be compared, or embedded, as they were so far; do it once more. Raises ReplayMismatch if it
        differs from the capture."""
        learned = twice is not None and self.learn(twice)
        if learned or (divergence is not None and self.explain(divergence.seen_at + 1, verify)):
            return False
        if divergence is not None:
            raise ReplayMismatch(
                f"{self.reader.path}: its replay differs from the capture, so nothing can be taken from it: "
                f"{divergence}"
            )
        return True

    def learn(self, twice: RunTwice) -> bool:
        """Whether running operators twice showed results that must not be compared, but have been so far."""
        found = []
        for each in twice.opaque:
            kernel = self.reader.kernels[each.kernel_id]
            found.append((kernel.name, kernel.overload, each.index, f"found by running it twice: {each.why}"))
        return self.know_opaque(found)

    def know_opaque(self, found: Iterable[tuple[str, str, int, str]]) -> bool:
        """Do not compare these results (operator, overload, index, why) from now on; whether any were so far."""
        before = self.context.opaque
        self.preparation.know_opaque(found)
        self.context = replace(self.context, opaque=self.preparation.opaque_slots())
        if self.context.opaque == before:
            return False
        self._kept.clear()
        return True

    def examine(self, on_op: Callable[[IsolatedOp], None], only: Slice | None = None) -> tuple[OpVerdict, ...]:
        """Run the ops one by one, unverified; before each that can be run, `on_op` is given it with its inputs. With
        `only`, those of a slice.

        Random generators go on as if `on_op` had drawn nothing. The plan must be made with keep_going.
        """
        if not self.options.keep_going:
            raise UsageError("examine needs a plan made with keep_going=True")
        if self.substitution is not None:
            self.substitution.check()

        def without_draws(op: IsolatedOp) -> None:
            with undrawn(self.generators):
                on_op(op)

        with self._surroundings():
            self.judge.reset(Verification("none", "none"), bitwise=False, stop_at_first=False)
            self._clock.reset(self.devices, None)
            return self._keep_going(self._machine(), False, None, without_draws, only).verdicts

    def verification(self, verify: VerifyMode, only: Slice | None = None) -> Verification:
        """How a replay can be verified here, with `only` a slice. Raises ReplayRefused if `bitwise` has nothing
        to compare."""
        with self._surroundings():
            self.differences()
            found = self._decide(verify, only)
        if self._unsteady and found.mode == "bitwise" and verify == "auto":
            return Verification(verify, "close", (self._why_tolerant(),))
        return found

    def watch(
        self,
        watcher: Watcher,
        stop: int,
        verify: VerifyMode = "auto",
        *,
        stand_in: KernelStandIn | None = None,
        judge: Judge | None = None,
        on_progress: Callable[[int], None] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> tuple[Verification, Divergence | None]:
        """Run what comes before ordinal `stop`, notifying `watcher` of its ops; returns how it was verified, and what
        differed. `stand_in` replaces kernels. `judge` gets all that can be compared, in place of the plan's. Calls with
        the same `checkpoints`, and everything else the same, share what they can.

        Reasons against replaying the rest do not matter. Raises ReplayRefused if there are any against this part,
        ReplayFailed if an op fails.
        """
        if self.substitution is not None:
            self.substitution.check(on_progress)
        with self._surroundings():
            verification = self._decide(verify)
            checks = verification.mode != "none" or judge is not None
            windows: Iterable[Window] | None = None if checkpoints is None else checkpoints.windows
            if windows is None:
                size = self.options.window if checkpoints is None else checkpoints.window_size(stop)
                scan = Scan(self.reader, self.preparation.effects, checks=checks, window=size, stop=stop)
                findings = self.preparation.findings_before(scan)
                if findings:
                    raise ReplayRefused(
                        f"{self.reader.path}: what comes before ordinal {stop} cannot be replayed here", findings
                    )
                context = replace(
                    self.context,
                    shapes=self._shapes(verify),
                    stand_in=stand_in or self.context.stand_in,
                    streams=None,
                    judge=judge or self.judge,
                )
                windows = Lowering(context, scan, compare=checks).windows(lower_watched(watcher))
                if checkpoints is not None and stop <= _KEPT_RECORDS:
                    windows = checkpoints.windows = list(windows)
            self.preparation.files.check()
            bitwise, tolerant = self._is_bitwise(verification), verify != "bitwise"
            self.judge.reset(verification, bitwise=bitwise, stop_at_first=True, tolerant=tolerant)
            self._clock.reset(self.devices, None)
            machine = self._machine(verified=checks)
            if checkpoints is not None and self._content.changed:
                checkpoints.clear()
            with suppress(StopReplay):
                machine.run(windows, None, on_progress, prepared=False, checkpoints=checkpoints)
            self.preparation.files.check()
        self._tell_tolerance(verification)
        return verification, self.judge.found[0] if self.judge.found else None

    def noting(self, notes: Notes) -> Judge:
        """A judge that gives `notes` what a replay computes, in place of comparing it."""
        return NotingJudge(self._clock, self._describe, notes)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        settings = dict(self.reader.session.settings)
        replacing = nullcontext() if self.substitution is None else python_dispatch()
        with surroundings(settings, self.generators), replacing:
            yield

    def _machine(self, *, verified: bool = False) -> Machine:
        self._content.begin(verified=verified)
        return Machine(self.reader, self._content, self._clock, self.judge, self.context.stand_in)

    def _keep_going(
        self,
        machine: Machine,
        checks: bool,
        on_scope: OnScope | None,
        on_op: Callable[[IsolatedOp], None] | None = None,
        only: Slice | None = None,
    ) -> KeepGoing:
        """Run the ops one by one; what ran them holds the verdicts."""
        scan = Scan(
            self.reader,
            self.preparation.effects,
            checks=checks,
            window=ONE_RECORD,
            needed=None if only is None else only.needed,
        )
        runner = KeepGoing(machine, self.preparation.refused, on_op)
        try:
            runner.run(Steps(replace(self.context, shapes=self._shapes("auto")), scan, compare=checks), on_scope)
        finally:
            self._clock.stop()
            machine.values.clear()
        return runner

    def _run_twice(self, stop: int, repeats: int = 1) -> RunTwice:
        """What is found by running the ops before an ordinal twice, on memory of other content; and those after it,
        too, once anything was found: more of the same may follow."""
        found = self.judge.found
        ordinals = range(self._searched if repeats == 1 else 0, self.reader.record_count)
        patience_s = max(_PATIENCE_S, _PATIENCE_RUNS * self._clock.elapsed_ns / 1e9)
        known = self._unsteady.keys()
        twice = RunTwice(self.generators, ordinals, patience_s, known=known, unless_found_by=stop, repeats=repeats)
        context = replace(self.context, stand_in=twice, shapes=Shapes.unchecked, streams=None)
        scan = Scan(self.reader, self.preparation.effects, checks=False, window=self.options.window)
        self.judge.reset(Verification("none", "none"), bitwise=False, stop_at_first=False)
        apply_settings(self.reader.session.settings)  # the run before may have stopped after changes
        self._clock.reset(self.devices, None)
        try:
            windows = Lowering(context, scan, compare=False).windows(lower_op)
            self._machine().run(windows, None, None, prepared=False)
        except StopReplay:
            pass  # `twice` says why
        except ReplayFailed as error:
            twice.given_up = f"the search for more ended: {error}"
        self.judge.found = found
        if repeats == 1:
            self._searched = max(self._searched, twice.reached)
        return twice

    def run_single(self, ordinal: int) -> tuple[OpVerdict, Any]:
        """Run one op, after those before it that it needs; its verdict, and what it returned."""
        scan = Scan(
            self.reader,
            self.preparation.effects,
            checks=False,
            window=ONE_RECORD,
            stop=ordinal + 1,
            needed=self.preparation.slice([ordinal]).needed,
        )
        steps = Steps(self.context, scan, compare=False, result_of=ordinal)
        with self._surroundings():
            self.judge.reset(Verification("none", "none"), bitwise=False, stop_at_first=False)
            self._clock.reset(self.devices, None)
            machine = self._machine()
            runner = KeepGoing(machine, self.preparation.refused)
            runner.run(steps, None)
            machine.values.clear()
            self.preparation.files.check()
        return runner.verdict(ordinal), runner.result

    def _is_bitwise(self, verification: Verification) -> bool:
        """Scalars that the program read are compared in every replay: without verification as `auto` would."""
        return verification.mode == "bitwise" or (verification.mode == "none" and not self.differences())

    def _shapes(self, verify: VerifyMode) -> Shapes:
        """What is checked about results in a run that does not verify them."""
        # An importer that worked out the results itself recorded nothing that a replay could differ from.
        if not self.synthesis.reason or self.reader.session.policies.get("results") == "inferred":
            return Shapes.unchecked
        return Shapes.content_decides if verify == "none" else Shapes.all

    def _decide(self, verify: VerifyMode, only: Slice | None = None) -> Verification:
        if self.synthesis.reason:
            if verify in ("bitwise", "close"):
                raise ReplayRefused(
                    f"{self.reader.path}: --verify={verify}: {self.synthesis.reason}", (self.synthesis.reason,)
                )
            reason = self.synthesis.reason if verify == "auto" else "verification was not asked for"
            return Verification(verify, "none", (reason,))
        policy = self.reader.session.policies.get("digests", "unknown")
        why = f"the capture holds nothing to compare with (digests={policy})"
        comparable = self.preparation.work.comparable
        if only is not None:
            comparable = only.comparable
            why = f"the capture holds nothing to compare the chosen ops with (digests={policy})"
        verification = decide(verify, self.differences(), comparable, why)
        if verify == "bitwise" and verification.mode == "none":
            raise ReplayRefused(f"{self.reader.path}: --verify=bitwise: {why}", (f"{why}; capture with digests=live",))
        return verification

    def _result(
        self,
        verification: Verification,
        memory: tuple[PeakMemory, ...],
        times: ScopeTimes | None,
        kept_going: KeepGoing | None,
        *,
        whole: bool,
    ) -> ReplayResult:
        found = self.judge.found
        verification.uncompared = self.preparation.work.uncompared if whole and verification.mode != "none" else 0
        verdicts, left_out = (None, ()) if kept_going is None else (kept_going.verdicts, tuple(kept_going.left_out))
        complete = whole and not self.findings and not left_out and all(each.verdict == "ok" for each in verdicts or ())
        work = self.preparation.work
        return ReplayResult(
            outcome="mismatched" if found else "ok" if complete else "incomplete",
            elapsed_ns=self._clock.elapsed_ns,
            ops=work.ops,
            kernels=work.kernels,
            scopes=work.scopes,
            verification=verification,
            divergence=found[0] if found else None,
            memory=memory,
            scope_ns=times.totals() if times else {},
            notes=(*self.notes, *self._content.notes, *(self.substitution.notes if self.substitution else ())),
            verdicts=verdicts,
            unsupported=work.unsupported,
            elsewhere=self.preparation.elsewhere,
            left_out=left_out,
            opaque_results=self.preparation.opaque_results(),
            execution=self._executions,
        )

    def close(self) -> None:
        """Release the storages kept between runs, and the file if the plan opened it."""
        self._content.release()
        self.preparation.close()
