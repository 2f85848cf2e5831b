"""Requests of one session stay at one worker, through a real router."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.v1 import router_pb2 as pb
from router.policy.create import PolicyConfig, PolicyName
from tests.router.system import running_system
from tests.router.test_servicer import generate, make_start


async def test_requests_of_a_session_are_decoded_where_explain_says_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ("decode-0", "decode-1", "decode-2")
    policy = PolicyConfig(name=PolicyName.ROUND_ROBIN, session_affinity=True)
    async with running_system(tmp_path, monkeypatch, *workers, policy=policy) as (system, stub):
        homes = set[str]()
        for key in ("ann", "bob", "cleo", "dan", "eve", "fay"):
            explained = await stub.Explain(pb.ExplainRequest(start=make_start(session_key=key)))
            [home] = [option.rank.worker_id for option in explained.options if option.is_chosen]
            others = {option.obstacle for option in explained.options if not option.is_chosen}
            assert others == {f"its session belongs to {home}/0"}
            for _ in range(3):
                [placement] = (await generate(stub, make_start(session_key=key)))[0].accepted.choices
                assert placement.decode.worker_id == home
            homes.add(home)
        assert len(homes) > 1
        # Without a session they take turns.
        turns = [(await generate(stub, make_start()))[0].accepted.choices[0].decode.worker_id for _ in range(3)]
        assert sorted(turns) == list(workers)
        await system.wait_idle()
