"""Every field of the contracts says what it means when unset, and in what it is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).resolve().parents[2] / "protos"

# What a comment says of absence: that it doesn't happen, or what it means.
SAYS_ABSENCE = re.compile(
    r"\b(Required\b|Always\b|Default\b|Absent\b|Empty:|Unspecified:|0:|Ignored\b|Aligned with\b)", re.IGNORECASE
)
# A duration has its unit in its type; what is to be said is what passes meanwhile.
SAYS_TIME = re.compile(r"\b(time|age|lasts|wait\w*)\b", re.IGNORECASE)
SAYS_UNIT = re.compile(r"\b(tokens?|bytes|elements|ranks|milliseconds)\b", re.IGNORECASE)
# Names of quantities that count something that the name doesn't show, unlike `num_blocks` and `size_bytes`.
IS_MEASURE = re.compile(r"(^|_)(size|len|dim|length|position|offset|offsets|unix_ms)$|_bytes$")

MESSAGE_TYPE, FIELD, NESTED, ONEOF = 4, 2, 3, 8  # field numbers in descriptor.proto, which paths are made of


@dataclass(frozen=True)
class Commented:
    """A field, or a oneof; exactly one member is the value."""

    name: str
    comment: str
    is_in_oneof: bool
    is_duration: bool

    def faults(self) -> list[str]:
        """What its comment should say and does not."""
        found = []
        # Of a oneof's members one is set or none: the oneof itself says what none means.
        if not self.is_in_oneof and not SAYS_ABSENCE.search(self.comment):
            found.append(f"{self.name}: {self.comment!r} does not say what absent means")
        if self.is_duration and not SAYS_TIME.search(self.comment):
            found.append(f"{self.name}: {self.comment!r} does not say the time of what it is")
        if IS_MEASURE.search(self.name) and not SAYS_UNIT.search(self.comment):
            found.append(f"{self.name}: {self.comment!r} does not say the unit")
        return found


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    return compile_protos(PROTOS, tmp_path_factory.mktemp("contracts"))


def compile_protos(root: Path, scratch: Path) -> list[FileDescriptorProto]:
    """The descriptors of all files under ``root``, comments included."""
    image = scratch / "image.binpb"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "--include_source_info", f"--descriptor_set_out={image}"),
        *(f"--proto_path={root}", f"--proto_path={files('grpc_tools') / '_proto'}"),
        *sorted(str(path) for path in root.rglob("*.proto")),
    ]
    subprocess.run(command, check=True, timeout=60)
    return list(FileDescriptorSet.FromString(image.read_bytes()).file)


def commented(file: FileDescriptorProto) -> Iterator[Commented]:
    """All fields and oneofs of ``file``."""
    comments = {tuple(where.path): " ".join(where.leading_comments.split()) for where in file.source_code_info.location}
    for index, message in enumerate(file.message_type):
        yield from _of_message(message, (MESSAGE_TYPE, index), message.name, comments)


def _of_message(
    message: DescriptorProto, path: tuple[int, ...], name: str, comments: dict[tuple[int, ...], str]
) -> Iterator[Commented]:
    for index, field in enumerate(message.field):
        is_in_oneof = field.HasField("oneof_index") and not field.proto3_optional
        is_duration = field.type_name == ".google.protobuf.Duration"
        comment = comments.get((*path, FIELD, index), "")
        yield Commented(f"{name}.{field.name}", comment, is_in_oneof, is_duration)
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for index, oneof in enumerate(message.oneof_decl):
        if index not in synthetic:
            comment = comments.get((*path, ONEOF, index), "")
            yield Commented(f"{name}.{oneof.name}", comment, is_in_oneof=False, is_duration=False)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _of_message(nested, (*path, NESTED, index), f"{name}.{nested.name}", comments)


def test_every_field_says_what_absent_means_and_in_what_it_is_measured(contracts: list[FileDescriptorProto]) -> None:
    fields = [field for file in contracts for field in commented(file)]
    assert len(fields) > 200
    faults = [fault for field in fields for fault in field.faults()]
    assert faults == [], "\n".join(faults)


def test_a_field_without_a_comment_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.proto").write_text(
        """
        syntax = "proto3";
        import "google/protobuf/duration.proto";
        message Bad {
          // A number.
          uint32 silent = 1;
          // Default 0.
          uint32 block_size = 2;
          // Absent: none.
          google.protobuf.Duration queue = 3;
          // Which.
          oneof choice {
            // A name.
            string name = 4;
          }
          // Tokens of a block. Always set.
          uint32 page_size = 5;
          // Absent: what it was.
          optional uint32 kept = 6;
          // A message.
          message Inner {
            string bare = 1;
          }
        }
        """
    )
    [bad] = compile_protos(tmp_path, tmp_path)
    named = [fault.partition(":")[0] for field in commented(bad) for fault in field.faults()]
    assert sorted(named) == ["Bad.Inner.bare", "Bad.block_size", "Bad.choice", "Bad.queue", "Bad.silent"]
