"""What --scope=NAME selects, from records alone."""

import pytest

from replayfmt.benchmark.meters import find_regions, whole_capture
from replayfmt.errors import ReplayRefused, UsageError

from .fakes import FakeReader

OP = ("op", 10, 1)


def region(script, name, **options):
    return find_regions(FakeReader(script, **options), (name,))[0]


def test_repeats_of_a_scope_add_up():
    script = [OP, ("begin", "step"), OP, OP, ("end", "step"), OP, ("begin", "step"), OP, ("end", "step")]
    found = region(script, "step")
    assert (found.passes, found.ops, found.captured_ns, found.row) == (2, 3, 300, "BM_replay/scope:step")


def test_nesting_of_the_same_name_counts_the_outermost_only():
    script = [("begin", "f"), OP, ("begin", "f/f"), OP, ("end", "f/f"), OP, ("end", "f")]
    found = region(script, "f")
    assert (found.passes, found.ops, found.captured_ns) == (1, 3, 300)
    assert found.paths == {"f", "f/f"}


def test_a_full_path_selects_that_scope_alone():
    script = [
        ("begin", "a"),
        ("begin", "a/x"),
        OP,
        ("end", "a/x"),
        ("end", "a"),
        ("begin", "b"),
        ("begin", "b/x"),
        OP,
        OP,
        ("end", "b/x"),
        ("end", "b"),
    ]
    assert (region(script, "x").passes, region(script, "x").ops) == (2, 3)
    assert (region(script, "b/x").passes, region(script, "b/x").ops) == (1, 2)


def test_scopes_that_cross_frames_are_followed():
    script = [OP, ("begin", "step"), OP, OP, OP, ("end", "step"), OP]
    for frames in ((1,), (2, 1), (3, 2), (1,) * 6):
        found = region(script, "step", frames=frames)
        assert (found.passes, found.ops, found.captured_ns) == (1, 3, 300)


def test_scopes_of_two_threads_that_overlap_count_from_the_first_begin_to_the_last_end():
    script = [("begin", "w"), OP, ("begin", "w"), OP, ("end", "w"), OP, ("end", "w")]
    assert (region(script, "w").passes, region(script, "w").ops) == (1, 3)


def test_several_names_are_found_in_one_pass_each_with_its_own_figures():
    script = [("begin", "a"), OP, ("begin", "a/b"), OP, ("end", "a/b"), ("end", "a")]
    outer, inner = find_regions(FakeReader(script), ("a", "b"))
    assert (outer.ops, inner.ops) == (2, 1)


def test_a_name_that_no_scope_has_is_a_usage_error_that_lists_the_scopes():
    with pytest.raises(UsageError, match=r"no scope of that name or path; it has 'init', 'init/load'") as raised:
        region([("begin", "init"), ("begin", "init/load"), ("end", "init/load"), ("end", "init")], "execute")
    assert raised.value.exit_code == 2


def test_a_capture_without_scopes_says_so():
    with pytest.raises(UsageError, match="it has no scopes at all"):
        region([OP], "execute")


def test_a_scope_that_is_defined_and_never_entered_is_a_usage_error():
    with pytest.raises(UsageError, match="never enters it"):
        region([("begin", "a/b"), OP, ("end", "a/b")], "a")


def test_an_end_before_a_begin_is_refused_with_its_ordinal():
    with pytest.raises(ReplayRefused, match=r"fake.opreplay: ordinal 1: scope 'step' ends before it begins"):
        region([OP, ("end", "step"), ("begin", "step"), OP, ("end", "step")], "step")


def test_an_end_of_another_matching_scope_does_not_stand_in_for_its_own():
    with pytest.raises(ReplayRefused, match="scope 'b/x' ends before it begins"):
        region([("begin", "a/x"), OP, ("end", "b/x")], "x")


def test_a_scope_that_does_not_end_is_refused_with_its_ordinal():
    with pytest.raises(ReplayRefused, match="scope 'step' begins at ordinal 1 or later and does not end") as raised:
        region([OP, ("begin", "step"), OP], "step")
    assert raised.value.exit_code == 1


def test_broken_scopes_that_were_not_asked_for_do_not_matter():
    assert region([("begin", "step"), OP, ("end", "step"), ("begin", "open")], "step").ops == 1


def test_the_whole_capture_runs_from_its_first_record_to_its_last():
    found = whole_capture(FakeReader([OP, OP, ("begin", "a"), ("end", "a")], frames=(3,)))
    assert (found.row, found.ops, found.captured_ns) == ("BM_replay", 2, 200)


def test_a_capture_without_times_says_that_it_has_none():
    script = [("begin", "step"), OP, ("end", "step")]
    for found in (region(script, "step", times=False), whole_capture(FakeReader(script, times=False))):
        assert found.captured_ns is None and "no times" in found.captured_reason
