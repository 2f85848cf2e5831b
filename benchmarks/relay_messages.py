"""The requests of the relay benchmarks, as messages of the contract."""

from __future__ import annotations

import random

import grpc

from quartet.v1 import decode_pb2, router_pb2, types_pb2

# The tiny model's ids below the first are special tokens, and it has 2048.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048


def make_start(
    rng: random.Random, *, seed: int, num_prompt_tokens: int, num_output_tokens: int, with_text: bool
) -> router_pb2.GenerateStart:
    """A start with a prompt of random token ids, so that no two share a prefix."""
    ids = rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_prompt_tokens)
    return router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=ids),
        sampling=types_pb2.Sampling(max_tokens=num_output_tokens, ignore_eos=True),
        seed=seed,
        text_options=router_pb2.TextOptions(omit_text=not with_text),
    )


def signed_request(placed: router_pb2.SignedPlacement, slot: int) -> decode_pb2.DecodeRequest:
    """The start that the router signed, for the decode worker."""
    start = decode_pb2.SignedDecodeStart(
        slot=slot, signed_start=placed.signed_start, key_id=placed.key_id, mac=placed.mac
    )
    return decode_pb2.DecodeRequest(signed_start=start)


def describe(error: grpc.aio.AioRpcError) -> str:
    """Its status and message, on one line."""
    return f"{error.code().name}: {error.details()}"


def describe_failure(failure: types_pb2.Failure) -> str:
    """Its reason and message, on one line."""
    return f"{failure.reason}: {failure.message}"
