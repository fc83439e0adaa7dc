"""Python files that are written from a capture: its texts are in comments and strings, never code."""

from __future__ import annotations

import io
import shutil
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from failure.table import recorded
from format.reseal import rename_kernel
from replay.rewriting import rewrite

from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.errors import InvalidCapture, UsageError
from replayfmt.format.reader import open_capture

MARK = "opreplay_hostile_marker"
TEXTS = [
    f'"""\n{MARK}()\n"""',
    f"'; {MARK}() #",
    f'\\"""\n{MARK}()',
    f"\n{MARK}()\n",
    f"\x0c{MARK}\r{MARK}()",
    f"# coding: {MARK}",
    f"{{{MARK}}}%s",
    f"\u2028{MARK}()",
    f"__import__('{MARK}')",
]
SCHEMAS = [
    "aten::exp(Tensor self, str x={}) -> Tensor",
    'aten::exp(Tensor self, *, str x="{}") -> Tensor',
    "aten::exp(Tensor {}) -> Tensor",
    "aten::exp({} self) -> Tensor",
    "aten::exp(Tensor self) -> (Tensor {})",
    'aten::exp(Tensor self, Device x="{}") -> Tensor',
    "aten::exp(Tensor self, int[{}] x=3) -> Tensor",
    "aten::exp(Tensor self, float x={}()) -> Tensor",
    "{}",
    "aten::exp(Tensor self{}) -> Tensor",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("source"), lambda: torch.ones(3).exp())


def _code(text: str) -> list[str]:
    """The tokens of a file that are neither comments nor strings."""
    inert = (tokenize.COMMENT, tokenize.STRING)
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in inert]


@pytest.mark.guarantee("written-python")
@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_a_kernels_skeleton_has_no_code_of_the_capture(source: Path, tmp_path: Path, schema: str) -> None:
    for place, text in enumerate(TEXTS):
        said = schema.replace("{}", text)
        hostile = rewrite(
            source,
            tmp_path / f"{place}.opreplay",
            kernel=lambda kernel, to=said: replace(kernel, schema=to) if kernel.name == "aten::exp" else kernel,
        )
        with open_capture(hostile) as reader:
            number = next(id for id, kernel in enumerate(reader.kernels) if kernel and kernel.name == "aten::exp")
            try:
                written = kernel_skeleton(reader, number)
            except UsageError:
                continue
        compile(written, "skeleton", "exec")
        # An argument's name may be any identifier; nothing of it is called.
        assert not [code for code in _code(written) if MARK in code and not code.isidentifier()]
        assert f"{MARK}(" not in "".join(_code(written))


def test_names_of_operators_in_a_skeleton_are_only_names(source: Path, tmp_path: Path) -> None:
    for place, text in enumerate(TEXTS):
        hostile = tmp_path / f"{place}.opreplay"
        shutil.copyfile(source, hostile)
        rename_kernel(hostile, "aten::exp", name=f"aten::{text}", schema=f"aten::{text}(Tensor self) -> Tensor")
        with pytest.raises(InvalidCapture, match="is not an operator name"):
            open_capture(hostile)
