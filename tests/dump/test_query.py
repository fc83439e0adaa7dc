"""--jq: a filter over each row, with output and errors like those of jq."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from shutil import which

import pytest

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import FilterFailed, Query, jsonl_chunks
from replayfmt.errors import UsageError
from replayfmt.format.reader import open_capture


def ask(text: str, *chunks: str) -> list[str]:
    return "".join(Query(text).apply(chunks)).splitlines()


def test_a_filter_is_applied_to_each_row_and_may_give_any_number_of_results() -> None:
    assert ask(".a", '{"a":1}\n{"a":[2,"x"]}\n', '{"b":3}\n') == ["1", '[2,"x"]', "null"]
    assert ask("select(.a > 1) | .a, -.a", '{"a":1}\n{"a":2}\n') == ["2", "-2"]
    assert ask("empty", '{"a":1}\n') == []
    assert ask("{b, a: .a}", '{"a":"é","b":null}\n') == ['{"b":null,"a":"é"}']


@pytest.mark.guarantee("terminal")
def test_raw_output_prints_strings_as_they_are_but_for_what_a_terminal_would_act_on() -> None:
    def raw(text: str, row: str) -> str:
        return "".join(Query(text, raw=True).apply([row + "\n"]))

    assert raw(".a, .b, .c", '{"a":"x y","b":[1,"z"],"c":null}') == 'x y\n[1,"z"]\nnull\n'
    assert raw("[.a, .b] | @tsv", '{"a":1,"b":"two"}') == "1\ttwo\n"
    assert raw('[.a, .b] | join("\\n")', '{"a":"1","b":"2"}') == "1\n2\n"
    hostile = raw(".a", json.dumps({"a": "\x1b[31mred\x00\u202e"}))
    assert hostile.removesuffix("\n").isprintable() and "31mred" in hostile


def test_slurp_gives_the_filter_all_rows_at_once() -> None:
    def slurped(text: str, *chunks: str, raw: bool = False) -> list[str]:
        return "".join(Query(text, raw=raw, slurp=True).apply(chunks)).splitlines()

    assert slurped("map(.a) | add", '{"a":1}\n{"a":2}\n', '{"a":4}\n') == ["7"]
    assert slurped("length", "") == ["0"]
    assert slurped("group_by(.op)[] | [.[0].op, length] | @tsv", '{"op":"b"}\n{"op":"a"}\n{"op":"b"}\n', raw=True) == [
        "a\t1",
        "b\t2",
    ]
    with pytest.raises(FilterFailed, match=r"failed on the array of all rows: \[{"):
        slurped("map(.a + 1 | error)", '{"a":1}\n')


def test_numbers_are_printed_by_jq_itself_without_loss() -> None:
    results = ask("nan, infinite, -infinite, [1e300, 100, 0.1]", "1")
    assert results[:3] == ["null", "1.7976931348623157e+308", "-1.7976931348623157e+308"]
    assert json.loads(results[3]) == [1e300, 100, 0.1]
    assert ask(".a, .b", '{"a":-0.0,"b":9007199254740991}\n') == ["-0.0", "9007199254740991"]
    assert ask("[.[]]", '[-0.0,0.0,1.5,"x\\u0001\\ud83d\\ude00"]') == ['[-0.0,0.0,1.5,"x\\u0001\U0001f600"]']


def test_a_filter_may_be_written_in_every_way_that_jq_takes() -> None:
    for text, expected in (
        ("1, 2", ["1", "2"]),
        (". as $x | $x, 3 # comment", ["7", "3"]),
        ("def f: 1; f", ["1"]),
        (". # comment \\", ["7"]),
        ('try error("x") catch .', ['"x"']),
        ("if . then 1 end # a \n # b", ["1"]),
        ("label $out | 5, break $out, 6", ["5"]),
        ("reduce (1, 2) as $i (.; . + $i)", ["10"]),
    ):
        assert ask(text, "7") == expected, text


@pytest.mark.parametrize("text", [".[", "nothing_of_this_name", "", "1 +", "$x", 'include "a"; .'])
def test_a_filter_that_does_not_compile_is_wrong_usage_in_jqs_words(text: str) -> None:
    with pytest.raises(UsageError, match="--jq: .*(?:error|not defined|not given|not found|unexpected)") as caught:
        Query(text)
    assert "\n" not in str(caught.value) and "^" not in str(caught.value)


def test_an_error_names_the_row_it_happened_on_and_keeps_the_results_before_it() -> None:
    results = Query('if .a == 2 then error("too\\nbad") else .a end').apply(['{"a":1}\n{"a":2}\n{"a":3}\n'])
    assert next(results) == "1\n"
    with pytest.raises(FilterFailed, match=r'too bad.*on this row: {"a":2}'):
        next(results)
    with pytest.raises(FilterFailed, match="…$") as caught:
        ask(".a + 1", json.dumps({"a": "x" * 10_000}))
    assert len(str(caught.value)) < 1000


@pytest.mark.skipif(which("jq") is None, reason="compares with the jq command")
@pytest.mark.parametrize(
    "text",
    [
        'select(.kind=="op") | [.op, .args[].value]',
        ".kind",
        "keys_unsorted",
        ".ordinal // empty",
        "[paths] | length",
        'select(.ordinal | not) | to_entries | map("\\(.key)=\\(.value)") | join(" ")',
    ],
)
def test_output_equals_that_of_the_jq_command(every: Path, text: str) -> None:
    with open_capture(every) as reader:
        rows = "".join(jsonl_chunks(reader, Selection()))
    theirs = subprocess.run(["jq", "-c", text], input=rows, capture_output=True, text=True, check=True).stdout
    ours = "".join(Query(text).apply([rows]))
    # By value: versions of jq differ in whether 1.0 stays 1.0.
    assert [json.loads(line) for line in ours[:-1].split("\n")] == [
        json.loads(line) for line in theirs[:-1].split("\n")
    ]
