"""Pools and a global router as processes: targets move requests between pools, and answers outlive their pool."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
import yaml

from quartet.client import (
    ChatMessage,
    Completion,
    Delta,
    GenerateFields,
    JsonObject,
    QuartetClient,
    RequestPath,
    Sampling,
    Tool,
    ToolChoice,
)
from quartet.client.stream import CompletionBuilder
from quartet.rpc.channels import TlsConfig
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.picture_asks import picture, picture_ask
from tests.e2e.test_guided import TEMPLATE
from tests.e2e.up import CONFIGS, Up, kill_at_once

pytestmark = pytest.mark.usefixtures("etcd_binary")

# Ten processes start, on a machine that may be busy.
TIMEOUT_S = 180.0
PROMPT = "Once upon a time there was a sea."
SAMPLING = Sampling(max_tokens=64, temperature=0.8, ignore_eos=True)
FAST, SLOW = {"ttft_target_s": 0.1, "itl_target_s": 0.01}, {"ttft_target_s": 0.9, "itl_target_s": 0.04}
OPTIONS = ("--tls", "--router-port", "0", "--set", f"model.path={tiny.CHECKPOINT}")


def identity(directory: Path, name: str) -> TlsConfig:
    """A certificate of the run."""
    [made] = (directory / ".run").glob("*/certificates/grpc")
    return TlsConfig(ca_file=made / "ca.pem", cert_file=made / f"{name}.pem", key_file=made / f"{name}.key")


async def placed(client: QuartetClient, targets: dict[str, float]) -> tuple[str, str, tuple[int, ...]]:
    """Where a request is prefilled and decoded, and its tokens; its blocks were moved."""
    whole = await client.complete(PROMPT, sampling=SAMPLING, seed=7, **targets)
    [placement], [choice] = whole.accepted.choices, whole.choices
    assert placement.prefill is not None and choice.finished.time.transfer_bytes > 0
    return placement.prefill.worker_id, placement.decode.worker_id, choice.token_ids


async def test_targets_choose_pools_and_an_answer_outlives_its_pool(tmp_path: Path, fork_server: ForkServer) -> None:
    started = Up(tmp_path, str(CONFIGS / "global.yaml"), *OPTIONS, python=fork_server.python)
    async with started as up, asyncio.timeout(TIMEOUT_S):
        await up.wait_ready()
        async with QuartetClient(up.router_address, tls=identity(tmp_path, "client")) as client:
            prefill, decode, tokens = await placed(client, FAST)
            assert (prefill, decode, len(tokens)) == ("prefill-fast", "decode-fast.decode-0", 64)
            assert await placed(client, SLOW) == ("prefill-slow", "decode-slow.decode-1", tokens)
            is_killed, disturbed = False, list[int]()
            async for part in client.generate(PROMPT, sampling=SAMPLING, seed=7, path="session", **SLOW):
                if isinstance(part, Delta):
                    disturbed += part.token_ids
                    if len(disturbed) > 4 and not is_killed:
                        is_killed = True
                        up.kill("router-decode-slow", "decode-1")
            assert tuple(disturbed) == tokens
            # A pool that prefills may die, too.
            up.kill("prefill-1", "router-prefill-slow")
            assert (await placed(client, SLOW))[2] == tokens
        await up.wait_logged("router-decode-slow serves again")
        await up.end(signal.SIGINT)


# Two pools that do everything, of the real engine: requests below 500 ms are for the fast one.
AGGREGATED = {
    "namespace": "global",
    "model": {"path": str(tiny.CHECKPOINT), "name": "tiny"},
    "engine": {"kind": "torch", "dtype": "float32", "num_blocks": 256, "modality": "multimodal"},
    "workers": [{"role": "decode", "pool": "fast"}, {"role": "decode", "pool": "slow"}],
    "global_router": {
        "mode": "agg",
        "num_agg_pools": 2,
        "agg_pool_dynamo_namespaces": ["fast", "slow"],
        "agg_pool_selection_strategy": {
            **{"ttft_min": 0, "ttft_max": 1000, "ttft_resolution": 2},
            **{"itl_min": 0, "itl_max": 100, "itl_resolution": 1},
            "agg_pool_mapping": [[0], [1]],
        },
    },
}
TO_FAST, TO_SLOW = 0.1, 0.9
TWO_PICTURES = picture_ask([picture(3), picture(4)], num_tokens=200)
PICTURES: GenerateFields = {
    "token_ids": TWO_PICTURES.token_ids,
    "media": TWO_PICTURES.media,
    "sampling": TWO_PICTURES.sampling,
}
# So long that its pool dies in the middle.
PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "array", "items": {"enum": ["Monday", "Friday", "Sunday"]}, "minItems": 30, "maxItems": 30}
    },
    "required": ["days"],
    "additionalProperties": False,
}
CALLS: GenerateFields = {
    "messages": [ChatMessage("user", "How is the weather?")],
    "tools": [Tool("weather", "Says it.", JsonObject.of_text(json.dumps(PARAMETERS)))],
    "tool_choice": ToolChoice.REQUIRED,
    "stream_tool_arguments": True,
    "sampling": Sampling(temperature=1.0, max_tokens=1000),
    "seed": 5,
    "num_choices": 2,
}


async def test_pictures_and_calls_outlive_the_pool_that_has_them(tmp_path: Path, fork_server: ForkServer) -> None:
    template, topology = tmp_path / "chat.jinja", tmp_path / "pools.yaml"
    template.write_text(TEMPLATE)
    for group in AGGREGATED["workers"]:
        group["overrides"] = {"custom_jinja_template": str(template)}
    topology.write_text(yaml.safe_dump(AGGREGATED))
    arguments = (str(topology), "--router-port", "0")
    async with Up(tmp_path, *arguments, python=fork_server.python) as up, asyncio.timeout(TIMEOUT_S):
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            looked = await client.complete(ttft_target_s=TO_FAST, **PICTURES)
            called = await client.complete(ttft_target_s=TO_SLOW, **CALLS)
            assert looked.accepted.choices[0].decode.worker_id == "fast.decode-0"
            assert called.accepted.choices[0].decode.worker_id == "slow.decode-1"
            for choice in called.choices:
                [call] = choice.tool_calls
                jsonschema.validate(json.loads(call.arguments.text), PARAMETERS)

            again = await outliving(up, client, ("router-slow", "decode-1"), ttft_target_s=TO_SLOW, **PICTURES)
            assert shown(again) == shown(looked)
            await up.wait_logged("router-slow serves again")
            await up.wait_logged("decode-1 serves again")
            again = await outliving(up, client, ("router-fast", "decode-0"), ttft_target_s=TO_FAST, **CALLS)
            assert shown(again) == shown(called)


async def outliving(up: Up, client: QuartetClient, names: Sequence[str], **fields: object) -> Completion:
    """The answer to a request whose pool's processes are killed once the client has some of its text or arguments."""
    # Found now: a search of all processes takes as long as dozens of tokens.
    builder, is_killed, pids = CompletionBuilder(), False, up.find(*names)
    async with client.generate(path=RequestPath.SESSION, **fields) as stream:
        async for part in stream:
            builder.add(part)
            has_begun = isinstance(part, Delta) and (part.text or any(call.arguments for call in part.tool_calls))
            if has_begun and not is_killed:
                is_killed = True
                kill_at_once(pids)
    completion = builder.build(stream.router)
    assert all(choice.finished.usage.num_attempts > 1 for choice in completion.choices), "it had ended before"
    return completion


def shown(completion: Completion) -> list[tuple[object, ...]]:
    """What of each choice must be the same whatever happened meanwhile; ids of calls are the request's own."""
    return [
        (
            choice.token_ids,
            choice.text,
            choice.reasoning,
            [(call.name, call.arguments) for call in choice.tool_calls],
            choice.finished.reason,
        )
        for choice in completion.choices
    ]
