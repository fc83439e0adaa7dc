"""What redaction leaves out, and what it must not touch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replayfmt.format.codes import OpStatus, RecordKind, ValueKind
from replayfmt.format.model import CaptureInfo, ExternalFile, Node, Signature
from replayfmt.format.redaction import REDACTED, Redaction

HOME = "/".join(("", "home", "alice"))  # no path of a machine stands in any file of the project
SESSION = CaptureInfo(
    session_id="01234567-89ab-cdef-0123-456789abcdef",
    producer="opreplay",
    producer_version="1",
    host="greybox",
    argv=(f"{HOME}/project/train.py", "--token=s3cret"),
    working_directory=f"{HOME}/project",
    torch_version="2.13.0",
    cpu="EPYC",
    settings={"num_threads": 2},
    libraries={"mkl": "2024 built in /opt/mkl/lib"},
    policies={"payload": "full"},
)


def test_a_redacted_session_says_nothing_of_host_user_paths_and_command_line() -> None:
    session = Redaction(SESSION).session
    everything = repr(session)
    for secret in ("alice", "greybox", "s3cret", "train.py", "/opt", "/project"):
        assert secret not in everything
    assert session.policies == {"payload": "full", "redact": True}
    assert (session.torch_version, session.cpu, session.settings) == ("2.13.0", "EPYC", {"num_threads": 2})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"no kernel in {HOME}/x.py:12", f"no kernel in {REDACTED}:12"),
        ("File '/data/my files/x.py', line 3", f"File {REDACTED}, line 3"),
        (r"C:\Users\bob\x.py failed", f"{REDACTED} failed"),
        ("see ~/notes and ~alice/notes", f"see {REDACTED} and {REDACTED}"),
        ("read /data/Alice B Smith/my models/x.bin, then", f"read {REDACTED}, then"),
        (r"D:\my data\x y\z.bin", REDACTED),
        ("of /data/x and more words", f"of {REDACTED} and more words"),
        ("from file:///data/x", f"from file:{REDACTED}"),
        ("run by alice on greybox", f"run by {REDACTED} on {REDACTED}"),
    ],
)
def test_paths_and_names_are_left_out_of_texts(text: str, left: str) -> None:
    assert Redaction(SESSION).text(text) == left


@pytest.mark.parametrize(
    "text",
    ["execute/step 3", "bij,bjk->bik", "and/or", "1 / 2", "aten::mm.default", "malice", "floor", "model.layers.0", ""],
)
def test_what_is_no_path_stays(text: str) -> None:
    assert Redaction(SESSION).text(text) == text


def test_short_names_are_left_out_where_they_are_words() -> None:
    session = replace(SESSION, host="vm")
    assert Redaction(session).text("tcp://vm:29500 vm0 kvm") == f"tcp:{REDACTED}:29500 vm0 kvm"
    assert Redaction(session).text("host=vm:29500") == f"host={REDACTED}:29500"


def test_words_of_the_caller_are_left_out_unless_they_are_common() -> None:
    redaction = Redaction(SESSION, ["carol", "root", "x"])
    assert redaction.text("carol root x") == f"{REDACTED} root x"


def test_an_op_never_gets_another_string_than_it_had() -> None:
    strings = (Node(ValueKind.string, "mode", "floor"), Node(ValueKind.string, "filename", f"{HOME}/weights"))
    signature = Signature(RecordKind.op, (*strings, Node(ValueKind.list, "all", None, strings)), (), 1, OpStatus.ok)
    redacted = Redaction(SESSION).signature(signature)
    kinds = [(node.kind, node.name) for node in redacted.nodes]
    opaque = (ValueKind.opaque, "filename")
    assert kinds == [(ValueKind.string, "mode"), opaque, (ValueKind.list, "all"), (ValueKind.string, "mode"), opaque]
    assert "alice" not in repr(redacted)


def test_texts_of_records_that_are_no_ops_are_rewritten() -> None:
    texts = {"reason": "host_call", "op": "f", "detail": f"at {HOME}/x.py"}
    signature = Signature(RecordKind.unsupported, tuple(Node(ValueKind.string, n, t) for n, t in texts.items()))
    assert [node.constant for node in Redaction(SESSION).signature(signature).args] == [
        "host_call",
        "f",
        f"at {REDACTED}",
    ]


def test_a_signature_without_secrets_is_the_same_object() -> None:
    signature = Signature(RecordKind.scope_begin, (Node(ValueKind.string, "name", "execute"),))
    assert Redaction(SESSION).signature(signature) is signature


def test_a_file_keeps_its_name_and_loses_its_directory() -> None:
    file = Redaction(SESSION).file(ExternalFile(f"{HOME}/llama/model.safetensors", 12, digest="0" * 32))
    assert (file.path, file.bytes, file.digest) == ("model.safetensors", 12, "0" * 32)


def test_annotations_are_rewritten_all_the_way_down() -> None:
    annotation = {"import": "inferred", "assumed": ["read from /data/trace.json"], "count": 3, "n": {"at": "/a/b"}}
    assert Redaction(SESSION).values(annotation) == {
        "import": "inferred",
        "assumed": [f"read from {REDACTED}"],
        "count": 3,
        "n": {"at": REDACTED},
    }
