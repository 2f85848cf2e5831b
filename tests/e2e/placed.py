"""A client of Place by its stubs: asks the router, then decodes at the worker itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from quartet.errors import ServingError
from quartet.rpc.errors import from_failure
from quartet.v1 import decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

TIMEOUT_S = 90.0
PROMPT = list(range(40, 140))
NUM_TOKENS = 24
SEED = 11


def make_start() -> router_pb2.GenerateStart:
    """A request whose tokens are the seed's."""
    sampling = types_pb2.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    return router_pb2.GenerateStart(token_ids=router_pb2.TokenIds(ids=PROMPT), sampling=sampling, seed=SEED)


def unsigned_start() -> decode_pb2.DecodeRequest:
    """A start of the client's own making."""
    prompt = b"".join(token_id.to_bytes(4, "little") for token_id in PROMPT)
    generation = types_pb2.Generation(
        prompt_token_ids=prompt, sampling=types_pb2.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True), seed=SEED
    )
    return decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(generation=generation))


def signed_start(stream: router_pb2.SignedPlacement) -> decode_pb2.DecodeRequest:
    """What the router signed, as it came."""
    signed = decode_pb2.SignedDecodeStart(signed_start=stream.signed_start, key_id=stream.key_id, mac=stream.mac)
    return decode_pb2.DecodeRequest(signed_start=signed)


def place(router: grpc.Channel) -> router_pb2.PlacedChoice:
    """Ask the router."""
    request = router_pb2.PlaceRequest(start=make_start())
    [choice] = router_pb2_grpc.RouterServiceStub(router).Place(request, timeout=TIMEOUT_S).choices
    return choice


@dataclass
class Decoded:
    """What one Decode stream brought."""

    token_ids: list[int] = field(default_factory=list)
    failures: list[ServingError] = field(default_factory=list)


def decode(worker: grpc.Channel, *requests: decode_pb2.DecodeRequest) -> Decoded:
    """Send these on one stream and half-close."""
    decoded = Decoded()
    for response in decode_pb2_grpc.DecodeServiceStub(worker).Decode(iter(requests), timeout=TIMEOUT_S):
        decoded.token_ids += response.token_ids
        decoded.failures += [from_failure(failed.failure) for failed in response.failures]
    return decoded


def generate(router: grpc.Channel) -> Sequence[int]:
    """The same request by Generate."""
    requests = iter([router_pb2.GenerateRequest(start=make_start())])
    responses = router_pb2_grpc.RouterServiceStub(router).Generate(requests, timeout=TIMEOUT_S)
    return [token_id for response in responses for token_id in response.delta.token_ids]
