"""Each field that may be long has a bound: the reader of a request knows it, and the .proto files state it."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc
from unit.protos.bounds import BOUNDS, ELSEWHERE, FILES, fields_of, methods

from paceline._links.frame import MAX_FRAME_BYTES
from paceline._links.grpc_door import MAX_WORD_BYTES
from pacelinepb.bounds import MOST, too_much
from pacelinepb.v1 import admin_pb2, peer_pb2, session_pb2, store_pb2

ROOT = Path(__file__).resolve().parents[3] / "protos"


@cache
def comments() -> dict[str, str]:
    """What the .proto files say of each field, as one line."""
    found = {}
    for file in described().file:
        said = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        for number, message in enumerate(file.message_type):
            for place, field in enumerate(message.field):
                found[f"{message.name}.{field.name}"] = " ".join(said[4, number, 2, place].split())
    return found


@cache
def described() -> FileDescriptorSet:
    """The files with their comments, which the stubs do not have."""
    with tempfile.NamedTemporaryFile() as out:
        paths = [f"-I{ROOT}", f"-I{resources.files('grpc_tools') / '_proto'}"]
        flags = ["--include_source_info", f"--descriptor_set_out={out.name}"]
        assert protoc.main(["protoc", *paths, *flags, *(file.DESCRIPTOR.name for file in FILES)]) == 0
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


REQUESTS = sorted(fields_of(method.input_type for method in methods()))
ANSWERS = sorted(fields_of(method.output_type for method in methods()) - {*REQUESTS})


def test_each_request_field_has_a_known_bound() -> None:
    assert sorted([*MOST, *ELSEWHERE]) == REQUESTS


@pytest.mark.parametrize("field", REQUESTS)
def test_the_comment_of_a_field_states_its_bound(field: str) -> None:
    most = BOUNDS[field]
    words = {1 << 20: "1 MiB", MAX_FRAME_BYTES: "4 MiB", 32: "(32 bytes|32 entries|SHA-256)"}.get(most, f"{most:,}")
    assert re.search(rf"\b{words}\b", comments()[field.removesuffix("[]")])


@pytest.mark.parametrize("field", ANSWERS)
def test_the_comment_of_a_response_field_states_its_bound(field: str) -> None:
    assert re.search(r"[Aa]t\s+most|\d bytes|SHA-256", comments()[field.removesuffix("[]")])


def test_the_documented_bound_of_an_abort_word_matches_the_code() -> None:
    assert f"of an ABORT {MAX_WORD_BYTES:,} bytes" in comments()["FramesRequest.payload"]


def test_too_much_names_the_field_that_exceeds_its_bound() -> None:
    assert too_much(session_pb2.SessionRequest(meet=session_pb2.Meet(shares=[session_pb2.Share()] * 64))) == ""
    for message, words in (
        (session_pb2.Meet(shares=[session_pb2.Share()] * 65), "Meet.shares has at most 64 entries, not 65"),
        (session_pb2.Resume(job="é" * 65), "Resume.job has at most 128 bytes, not 130"),
        (session_pb2.Meet(manifest=bytes(33)), "Meet.manifest has at most 32 bytes, not 33"),
        (admin_pb2.DrainMembersRequest(members=["a", "b" * 65]), "an entry of DrainMembersRequest.members has at most"),
        (store_pb2.AddRequest(caller=store_pb2.Caller(member_id="m" * 65)), "Caller.member_id has at most 64 bytes"),
        (peer_pb2.GetRunsRequest(runs=[peer_pb2.ElementRun(array="a" * 5_000)]), "ElementRun.array has at most 4,096"),
    ):
        assert too_much(message).startswith(words)
