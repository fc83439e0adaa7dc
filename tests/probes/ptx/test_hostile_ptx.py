"""PTX that was made to be slow or to surprise is read at once, or is one clear error."""

import contextlib
import time

import pytest

from replayfmt.probes.ptx import PtxError, parse_ptx

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
KERNEL = HEAD + ".visible .entry k(.param .u64 p)\n{\n%s\nret;\n}\n"


def test_an_empty_statement_is_no_instruction() -> None:
    assert [each.opcode for each in parse_ptx(KERNEL % ";;").entries[0].instructions] == ["ret"]


def test_a_guard_without_an_instruction_is_an_error() -> None:
    with pytest.raises(PtxError, match="line 6: expected an instruction"):
        parse_ptx(KERNEL % "@%p ;")


def test_an_entry_inside_another_is_an_error() -> None:
    with pytest.raises(PtxError, match="is an entry function inside k"):
        parse_ptx(KERNEL % ".entry inner(.param .u64 p) { ret; }")


@pytest.mark.parametrize(
    "text",
    [
        KERNEL % (";" * 65536),
        HEAD + ".entry k(.param " + " " * 65536 + ")",
        HEAD + ".entry k(.param .u64 " + " \t" * 32768 + "p !) { ret; }",
        "\n" * 65536,
        HEAD + "/*" * 32768,
        HEAD + '"\\' * 32768,
        HEAD + ".entry k(.param .u64 p){" * 2700,
        HEAD + (".entry k(.param .u64 p){ ret; }\n" + "{" * 9) * 1600,
        KERNEL.replace("8.0", "8" * 65000 + ".0") % "",
    ],
)
def test_text_of_64_kilobytes_takes_less_than_a_second_of_the_processor(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(PtxError):
        parse_ptx(text)
    assert time.process_time() - began < 1.0
