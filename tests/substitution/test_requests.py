"""What a substitution on the command line asks for: selector, format, path and name, taken apart with care."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replayfmt.errors import UsageError
from replayfmt.replay.substitution.loading import Substitution, parse_request, parse_selector, split_path


@pytest.mark.parametrize(
    ("text", "kernel_id", "operator", "everything", "form", "path", "name"),
    [
        ("3=k.py", 3, None, False, "python", "k.py", ""),
        ("aten::mm=k.py:fast", None, "aten::mm", False, "python", "k.py", "fast"),
        ("aten::mm.default=k.py", None, "aten::mm.default", False, "python", "k.py", ""),
        ("aten::add.Tensor@python=k.txt:f", None, "aten::add.Tensor", False, "python", "k.txt", "f"),
        ("all=k.py", None, None, True, "python", "k.py", ""),
        ("aten::mm=lib.so:mine::mm", None, "aten::mm", False, "torch-library", "lib.so", "mine::mm"),
        ("aten::mm=lib.so:mine::mm.out", None, "aten::mm", False, "torch-library", "lib.so", "mine::mm.out"),
        ("aten::mm=module.py:mine::mm", None, "aten::mm", False, "torch-library", "module.py", "mine::mm"),
        ("aten::mm@torch-library=module.py", None, "aten::mm", False, "torch-library", "module.py", ""),
        ("aten::mm=a=b/k.py", None, "aten::mm", False, "python", "a=b/k.py", ""),
    ],
)
def test_every_part_is_found(
    text: str, kernel_id: int | None, operator: str | None, everything: bool, form: str, path: str, name: str
) -> None:
    request = parse_request(text)
    selector = request.selector
    assert (selector.kernel_id, selector.operator, selector.everything) == (kernel_id, operator, everything)
    assert (request.format, request.path, request.name) == (form, path, name)


@pytest.mark.parametrize(
    "signature",
    [
        "aten::mm.default(float32[2,3], *)",
        "aten::mm.default(float32[2,3]@cuda:0, float32[3,2]{1,3}@cuda:0)",
        'aten::gelu.default(*, approximate: "a)@python:\\u003d")',
    ],
)
def test_signatures_have_colons_and_at_signs_of_their_own(signature: str) -> None:
    for text, form in ((f"{signature}=k.py:f", "python"), (f"{signature}@torch-library=k.py:f", "torch-library")):
        request = parse_request(text)
        assert str(request.selector.signature) == signature
        assert (request.format, request.path, request.name) == (form, "k.py", "f")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected SELECTOR[@FORMAT]=PATH[:NAME]"),
        ("aten::mm", "expected SELECTOR[@FORMAT]=PATH[:NAME]"),
        ("=k.py", "the selector is empty"),
        (" =k.py", "the selector is empty"),
        ("@python=k.py", "the selector is empty"),
        ("aten::mm=", "the path is empty"),
        ("aten::mm=:f", "the path is empty"),
        ("aten::mm@=k.py", "the format is empty; expected python, torch-library, triton or cubin"),
        ("aten::mm@cuda=k.py", "'cuda' is not a format; expected python, torch-library, triton or cubin"),
        ("0=k.py", "kernel id 0: ids count from 1"),
        ("-1=k.py", "kernel id -1: ids count from 1"),
        ("99999999999=k.py", "ids count from 1"),
        ("mm=k.py", "'mm' is not a selector"),
        ("aten::mm::x=k.py", "is not a selector"),
        ("aten::mm.a.b=k.py", "is not a selector"),
        ("aten::mm(float32[2])=k.py", "expected a kernel with its overload"),
        ("aten::mm.default(=k.py", "is not a signature"),
        (
            "aten::mm=kernel.cu",
            "the format of 'kernel.cu' cannot be inferred from its name; put @python or @torch-library",
        ),
        ("aten::mm=k.py:", "'' is neither a function's nor an operator's name"),
    ],
)
def test_what_is_missing_or_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_request(text)
    assert said in str(raised.value)


def test_the_longest_beginning_that_is_a_file_is_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("k.py", "k.py:fast", "odd=@:name.py"):
        Path(name).write_text("")
    assert split_path("k.py") == ("k.py", None)
    assert split_path("k.py:slow") == ("k.py", "slow")
    assert split_path("k.py:fast") == ("k.py:fast", None)
    assert split_path("k.py:fast:other") == ("k.py:fast", "other")
    assert split_path("odd=@:name.py") == ("odd=@:name.py", None)
    assert split_path("odd=@:name.py:f") == ("odd=@:name.py", "f")
    assert split_path(os.path.join(tmp_path, "k.py") + ":mine::mm.out") == (str(tmp_path / "k.py"), "mine::mm.out")
    assert split_path("gone.py:f") == ("gone.py", "f")
    assert split_path("gone.so:mine::mm") == ("gone.so", "mine::mm")


def test_a_function_is_a_request_too_and_has_to_be_one() -> None:
    request = Substitution("aten::mm", len).request()
    assert request.function is len and request.selector.operator == "aten::mm"
    with pytest.raises(UsageError, match="expected a function, got int"):
        Substitution("aten::mm", 3).request()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the selector is empty"):
        Substitution("", len).request()


def test_a_selector_is_read_by_itself() -> None:
    assert parse_selector("all", "x").everything
    assert parse_selector("12", "x").kernel_id == 12
