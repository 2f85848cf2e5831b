"""Messages of the bare relay of requests: nothing is in them, but they are as long as the real ones."""

from __future__ import annotations

import random

from benchmarks.relay_messages import make_start
from quartet.v1 import router_pb2

#: Ends each answer's last message, and is in no other: a client counts them.
MARK = b"\1"
#: What a request with one token out is answered with, less what tells whose it is on a shared stream.
ACCEPTED, DELTA, FINISHED = bytes(122), bytes(6), bytes(46) + MARK
#: What the worker says of one request.
WORKER_ANSWER = bytes(39) + MARK

_LONG_SEED = 1 << 13
# The prompt is in the signed start, four bytes a token.
_PLACE_BYTES, _PLACE_BYTES_PER_TOKEN = 360, 4


def make_start_bytes(num_prompt_tokens: int) -> bytes:
    """A start with so many token ids."""
    rng = random.Random(0)
    start = make_start(rng, seed=_LONG_SEED, num_prompt_tokens=num_prompt_tokens, num_output_tokens=1, with_text=False)
    return bytes(router_pb2.GenerateRequest(start=start).ByteSize())


def make_place_response(num_prompt_tokens: int) -> bytes:
    """A placement of such a start."""
    return bytes(_PLACE_BYTES + _PLACE_BYTES_PER_TOKEN * num_prompt_tokens)
