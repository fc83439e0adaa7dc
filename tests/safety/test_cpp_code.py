"""Captures with a C++ kernel that leaves a mark when its library is loaded, and when it is called."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format.samples import IMPORT, SESSION, Records, op

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.attachments import body_metadata
from replayfmt.format.codes import DType, KernelKind, Layout, StorageOrigin, ValueKind
from replayfmt.format.model import Attachment, Device, Kernel, Node, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter
from replayfmt.native.building import NotAvailable, compiler
from replayfmt.pytorch.cpp_kernels import StoredCppKernel, machine_of_code, parse_parameters, schema_of

V = ValueKind
PARAMETERS = "float* x, int64_t n"
# A Python extension, so that it can be loaded as those of Inductor are.
SOURCE = f"""
#include <Python.h>
#include <cstdio>
static void mark(const char* name) {{ std::fclose(std::fopen(name, "w")); }}
__attribute__((constructor)) static void loaded() {{ mark("loaded"); }}
extern "C" void kernel({PARAMETERS}) {{}}
static PyObject* call(PyObject*, PyObject*) {{ mark("called"); Py_RETURN_NONE; }}
static PyMethodDef methods[] = {{{{"kernel", call, METH_VARARGS, ""}}, {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods}};
PyMODINIT_FUNC PyInit_kernel() {{ return PyModule_Create(&module); }}
"""
FLAGS = ("-shared", "-fPIC", "-O0")
HERE, ELSEWHERE = "this machine", "another machine"


@dataclass
class Said:
    """What a capture says of its kernel and of the call."""

    library: bytes
    source: str = SOURCE
    flags: tuple[str, ...] = FLAGS
    machine: str = HERE
    schema: str = ""  # that of the source, unless it is given
    attached: dict[str, bytes] = field(default_factory=dict)  # in place of what belongs there
    dtype: DType = DType.float32
    sizes: tuple[int, ...] = (2,)
    count: Node = Node(V.int, "n")
    called: bool = True
    missing_operator: bool = False  # which the capture calls, too

    def write(self, path: Path, *, as_body: bool = False) -> Path:
        """The capture. `as_body`: as that of a graph, whose memory is given."""
        compiled_for = dict(machine_of_code())
        if self.machine != HERE:
            compiled_for["cpu"] = self.machine
        stored = StoredCppKernel(PARAMETERS, self.source, self.library, self.flags, compiled_for)
        name, variant = "cpp_fused_mark_0", stored.variant()
        schema = self.schema or schema_of(name, variant, parse_parameters(PARAMETERS))
        writer = CaptureWriter(path, replace(SESSION, settings={}))
        cpu = writer.device(Device("cpu"))
        contents = {**stored.contents(), **self.attached}
        numbers = tuple(
            writer.attachment(Attachment(role, f"../../{role}\0", writer.payload(content)))
            for role, content in contents.items()
        )
        payload = writer.payload(np.array([1.0, -2.0], np.float32).data)
        records = Records(writer)
        storage = (
            records.storage(8, cpu, StorageOrigin.absent)
            if as_body
            else records.storage(8, cpu, StorageOrigin.payload, payload)
        )
        tensor = records.tensor(storage, 0, writer.meta(TensorMeta(self.dtype, Layout.strided, cpu, self.sizes, (1,))))
        if not as_body:
            records.add(IMPORT, ints=(storage, payload, 0))
        kernel = writer.kernel(Kernel(f"inductor_cpp::{name}", variant, schema, KernelKind.inductor_cpp, numbers))
        if self.called:
            values = (2,) if self.count.kind is V.int else ()
            records.add(op(kernel, (Node(V.tensor, "x"), self.count)), (tensor,), values)
        else:
            neg = writer.kernel(Kernel("aten::neg_", "default", "aten::neg_(Tensor(a!) self) -> Tensor(a!)"))
            records.add(op(neg, (Node(V.tensor, "self"),), (Node(V.tensor),)), (tensor, tensor))
        if self.missing_operator:
            none = writer.kernel(Kernel("aten::nothing", "default", "aten::nothing(Tensor(a!) self) -> ()"))
            records.add(op(none, (Node(V.tensor, "self"),)), (tensor,))
        records.write()
        writer.close(1)
        return path

    def write_graph(self, path: Path) -> Path:
        """A capture that replays a graph of it once."""
        with open_capture(self.write(path.with_suffix(".body"), as_body=True)) as body:
            metadata = body_metadata(body, "cpu", 1, False, "")
        writer = CaptureWriter(path, replace(SESSION, settings={}))
        cpu = writer.device(Device("cpu"))
        contents = {"body": path.with_suffix(".body").read_bytes(), "metadata": json.dumps(metadata).encode()}
        numbers = tuple(
            writer.attachment(Attachment(role, role, writer.payload(content))) for role, content in contents.items()
        )
        payload = writer.payload(np.array([1.0, -2.0], np.float32).data)
        records = Records(writer)
        storage = records.storage(8, cpu, StorageOrigin.payload, payload)
        tensor = records.tensor(storage, 0, writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2,), (1,))))
        records.add(IMPORT, ints=(storage, payload, 0))
        schema = "graph::captured_1.v1(Tensor(a0!) s1) -> ()"
        kernel = writer.kernel(Kernel("graph::captured_1", "v1", schema, KernelKind.graph, numbers))
        records.add(op(kernel, (Node(V.tensor, "s1"),)), (tensor,))
        records.write()
        writer.close(1)
        return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    try:
        command = compiler()
    except NotAvailable as problem:
        pytest.skip(f"needs a C++ compiler ({problem})")
    made = tmp_path_factory.mktemp("marking")
    (made / "kernel.cpp").write_text(SOURCE)
    flags = [*FLAGS, f"-I{sysconfig.get_path('include')}", str(made / "kernel.cpp"), "-o", str(made / "kernel.so")]
    subprocess.run([*command, *flags], check=True, timeout=300)
    return (made / "kernel.so").read_bytes()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(said: Said, allow_code: bool, *, graph: bool = False) -> str:
    write = said.write_graph if graph else said.write
    with pytest.raises(OpReplayError) as caught:
        replayfmt.run(write(Path(f"{allow_code}.opreplay")), verify="none", allow_code=allow_code)
    return " ".join([str(caught.value), *getattr(caught.value, "findings", ())])


HOSTILE: dict[str, tuple[Callable[[bytes], dict[str, Any]], str]] = {
    "a library that is not the one of its digest": (
        lambda library: {"attached": {"object": library + b"\0"}},
        "does not match the digest",
    ),
    "another source": (lambda _: {"attached": {"source": SOURCE.encode() + b"//"}}, "another than the one it is named"),
    "a source with other parameters": (
        lambda _: {"attached": {"source": SOURCE.replace("float* x", "float* y").encode()}},
        "other parameters",
    ),
    "a schema that hides what is written": (
        lambda _: {"schema": "inductor_cpp::cpp_fused_mark_0.v1(Tensor x, int n) -> ()"},
        "is not that of its source",
    ),
    "a schema that has no end": (
        lambda _: {"schema": "inductor_cpp::cpp_fused_mark_0.v1(" + "Tensor[](" * 50_000},
        "cpp_fused_mark_0",
    ),
    "metadata that is no JSON": (lambda _: {"attached": {"metadata": b"{"}}, "its metadata is not JSON"),
    "a plugin of the compiler": (
        lambda _: {"flags": (*FLAGS, "-fplugin=./mark.so"), "machine": ELSEWHERE},
        "the captured flag '-fplugin=./mark.so' is not one",
    ),
    "a program for the compiler to call": (
        lambda _: {"flags": (*FLAGS, "-wrapper", "touch,loaded"), "machine": ELSEWHERE},
        "the captured flag '-wrapper' is not one",
    ),
    "a file for the compiler to write": (
        lambda _: {"flags": (*FLAGS, "-fopt-info-vec=loaded"), "machine": ELSEWHERE},
        "the captured flag '-fopt-info-vec=loaded' is not one",
    ),
}
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor past its storage": ({"sizes": (3,)}, "a tensor needs 12 bytes of a storage that has 8"),
    "elements of another dtype": ({"dtype": DType.int32}, "points to elements of torch.float32"),
}
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a text as a number": ({"count": Node(V.string, "n", "2")}, "takes int as `n`, the capture has string"),
    "no number": ({"count": Node(V.none, "n")}, "takes int as `n`, the capture has none"),
    "a device as a number": ({"count": Node(V.device, "n", 1)}, "takes int as `n`, the capture has device"),
    "an argument of another name": ({"count": Node(V.int, "m")}, "does not take the arguments"),
    "an operator that does not exist": ({"missing_operator": True}, "aten::nothing.default does not exist"),
}


@pytest.mark.guarantee("cpp-kernels")
@pytest.mark.parametrize("graph", [False, True], ids=["op", "graph"])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_refused_with_and_without_leave(name: str, graph: bool, library: bytes) -> None:
    change, why = HOSTILE[name]
    for allow_code in (True, False):
        said = refused(Said(library, **change(library)), allow_code, graph=graph)
        assert (why if allow_code else "") in said
    assert not Path("loaded").exists()


@pytest.mark.guarantee("code-order")
@pytest.mark.parametrize("graph", [False, True], ids=["op", "graph"])
@pytest.mark.parametrize("name", CALLS)
def test_where_a_call_does_not_fit_no_code_is_loaded(name: str, graph: bool, library: bytes) -> None:
    change, why = CALLS[name]
    assert why in refused(Said(library, **change), True, graph=graph)
    assert not Path("loaded").exists()


@pytest.mark.guarantee("cpp-kernels")
@pytest.mark.parametrize("graph", [False, True], ids=["op", "graph"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_call_that_does_not_fit_is_refused_before_it_is_made(name: str, graph: bool, library: bytes) -> None:
    change, why = TENSORS[name]
    assert why in refused(Said(library, **change), True, graph=graph)
    assert not Path("called").exists()


@pytest.mark.guarantee("cpp-kernels")
@pytest.mark.parametrize("graph", [False, True], ids=["op", "graph"])
@pytest.mark.parametrize("machine", [HERE, ELSEWHERE])
def test_a_library_is_loaded_and_a_source_compiled_only_with_leave(machine: str, graph: bool, library: bytes) -> None:
    said = Said(library, machine=machine)
    write = said.write_graph if graph else said.write
    assert "its code is in the capture (source, object, metadata), and runs only with --allow-code" in refused(
        said, False, graph=graph
    )
    assert not Path("loaded").exists() and not Path("cache").exists()
    assert replayfmt.run(write(Path("c.opreplay")), verify="none", allow_code=True).outcome == "ok"
    assert Path("loaded").exists() and Path("called").exists(), "what the other tests look for"


@pytest.mark.guarantee("code-order")
def test_the_code_of_a_kernel_that_nothing_calls_is_not_loaded(library: bytes) -> None:
    said = Said(library, called=False)
    assert replayfmt.run(said.write(Path("c.opreplay")), verify="none", allow_code=True).outcome == "ok"
    assert not Path("loaded").exists()


@pytest.mark.slow
def test_a_source_that_includes_files_of_this_machine_is_not_compiled_without_leave(library: bytes) -> None:
    Path("secret.h").write_text("#error the secret\n")
    said = Said(library, source=f'#include "{Path("secret.h").absolute()}"\n{SOURCE}', machine=ELSEWHERE)
    assert "secret" not in refused(said, False)
    assert "cannot be compiled here" in refused(said, True)
