"""What the fuzzer draws: the same for a seed, of every kind, for every method."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from benchmarks.fuzz import SERVICES, SURFACES, Turns
from benchmarks.fuzz_calls import End, draw_script, methods_of
from benchmarks.fuzz_messages import Known, MessageMaker
from quartet.v1 import router_pb2

GENERATE = router_pb2.DESCRIPTOR.message_types_by_name["GenerateRequest"]


def maker(seed: int, *, huge_share: float = 0.0) -> MessageMaker:
    return MessageMaker(random.Random(seed), Known(), huge_share=huge_share)


def parses(data: bytes) -> bool:
    try:
        GetMessageClass(GENERATE).FromString(data)
    except DecodeError:
        return False
    return True


def test_a_seed_gives_the_same_bodies_whatever_is_known() -> None:
    known = Known(tickets=[(b"a" * 16, b"b" * 16, 7)], epochs=[3], addresses=["127.0.0.1:9"])
    other = MessageMaker(random.Random(1), known, huge_share=0.0)
    here, again = maker(1), maker(1)
    assert [here.body(GENERATE) for _ in range(50)] == [again.body(GENERATE) for _ in range(50)]
    here = maker(1)
    sizes = [len(here.body(GENERATE)) for _ in range(200)]
    assert sizes == [len(other.body(GENERATE)) for _ in range(200)]


def test_most_bodies_parse_and_some_do_not() -> None:
    drawn = maker(2)
    share = sum(parses(drawn.body(GENERATE)) for _ in range(400)) / 400
    assert 0.7 < share < 0.98


def test_a_huge_body_is_long_and_parses() -> None:
    drawn = maker(3, huge_share=1.0)
    bodies = [drawn.body(GENERATE) for _ in range(30)]
    assert all(len(body) > 9_000 for body in bodies)
    assert sum(map(parses, bodies)) > 20


def test_huge_bodies_have_long_data_urls_of_every_kind() -> None:
    drawn = maker(5, huge_share=1.0)
    url = router_pb2.DESCRIPTOR.message_types_by_name["GenerateStart"].fields_by_name["media"].message_type
    bodies = b"".join(drawn.body(url)[:60] for _ in range(250))
    for begin in (b"data:image/png;base64,AAAA", b"data:;base64,A A ", b"data:;base64,%41%41", b"data:,%41%41"):
        assert begin in bodies
    drawn = maker(6, huge_share=1.0)
    assert any(b"data:" in drawn.body(GENERATE) for _ in range(250)), "one is drawn somewhere in a whole request"


@pytest.mark.parametrize("service", [service for service, _ in SERVICES.values()])
def test_every_method_is_called_and_ended_in_every_way(service: str) -> None:
    methods, draw = methods_of(service), random.Random(4)
    drawn = MessageMaker(draw, Known(), huge_share=0.0)
    scripts = [draw_script(draw, drawn, methods) for _ in range(300)]
    assert {script.path for script in scripts} >= {method.path for method in methods}
    assert {script.end for script in scripts} >= {End.HALF_CLOSE, End.CANCEL, End.DEADLINE}


def test_a_round_gives_each_surface_its_share() -> None:
    turns = Turns(list(SURFACES))
    taken = [turns.take()[0] for _ in range(sum(SURFACES.values()))]
    assert {name: taken.count(name) for name in SURFACES} == SURFACES
    assert Turns(["etcd"], first_batch=5).take() == ("etcd", 5)
