"""The messages of one disaggregated request, made field by field and read back by the generated code alone.

Fields are set as Quartet sets them for a prompt of that length on one host: what varies in length with the prompt does
so here, ids and names have their usual lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from quartet.v1 import decode_pb2, prefill_pb2, router_pb2, transfer_pb2, types_pb2

#: Tokens of a block.
BLOCK_SIZE = 32

_PIECE_SIZE_BYTES, _POOL_SIZE_BYTES = 1 << 20, 288 << 20
# From here on an id takes two bytes, as most of a pool's do.
_FIRST_BLOCK_ID = 128
_TOKEN_ID, _TOKEN_TEXT = 428, "token"
_REQUEST_ID, _FINGERPRINT, _EPOCH, _SEED = "5" * 32, "a" * 64, 0xFEDCBA9876543210, 0xFEDCBA9876543210
_ID, _SECRET, _POOL_TOKEN = b"i" * 16, b"s" * 16, b"t" * 16
_ROUTER_ID = f"{'b' * 32}.{_EPOCH:x}"
_WORKER_ID, _ADDRESS = "prefill-0", "127.0.0.1:50051"
_BOOT_ID, _IPC_NAMESPACE = "01234567-89ab-cdef-0123-456789abcdef", "ipc:[4026531839]"
_SOCKET_PATH = f"@quartet-shm-{'c' * 32}"


def generate_request(token_ids: Sequence[int]) -> bytes:
    """A client's request for two tokens after a prompt."""
    start = router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=token_ids), sampling=types_pb2.Sampling(max_tokens=2, ignore_eos=True)
    )
    return router_pb2.GenerateRequest(start=start).SerializeToString()


def read_generate_start(message: bytes) -> router_pb2.GenerateStart:
    """A client's start."""
    return router_pb2.GenerateRequest.FromString(message).start


def pack_prompt(start: router_pb2.GenerateStart) -> bytes:
    """The prompt as the worker streams wants it."""
    return array("I", list(start.token_ids.ids)).tobytes()


def accepted(num_tokens: int) -> bytes:
    """Where a request with a prompt of ``num_tokens`` runs, as the client gets it before all else."""
    response = router_pb2.GenerateResponse()
    response.accepted.request_id, response.accepted.seed = _REQUEST_ID, _SEED
    response.accepted.num_prompt_tokens, response.accepted.model_fingerprint = num_tokens, _FINGERPRINT
    placement = response.accepted.choices.add()
    placement.prefill.worker_id, placement.decode.worker_id = _WORKER_ID, "decode-0"
    return response.SerializeToString()


def prefill_request(prompt: bytes, sampling: types_pb2.Sampling) -> bytes:
    """The router's start of a prefill."""
    request = prefill_pb2.PrefillRequest()
    _put_context(request.start.context)
    _put_generation(request.start.generation, prompt, sampling)
    return request.SerializeToString()


def read_prefill_prompt(message: bytes) -> list[int]:
    """The prompt of a prefill's start, as an engine needs it."""
    return list_token_ids(prefill_pb2.PrefillRequest.FromString(message).start.generation)


def prefill_response(num_tokens: int) -> bytes:
    """The first token after a prompt of ``num_tokens``, and a hand-off of its blocks."""
    response = prefill_pb2.PrefillResponse()
    result = response.outputs.add(slot=0).result
    result.token_id = _TOKEN_ID
    result.queue.CopyFrom(Duration(nanos=400_000))
    result.compute.CopyFrom(Duration(nanos=10_200_000))
    hand_off = result.hand_off
    hand_off.hand_off_id, hand_off.secret = _ID, _SECRET
    hand_off.worker_id, hand_off.epoch, hand_off.address = _WORKER_ID, _EPOCH, _ADDRESS
    hand_off.lease.seconds = 30
    layout = hand_off.blocks.layout
    layout.model_fingerprint, layout.dtype = _FINGERPRINT, "bfloat16"
    layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size = 16, 8, 64, BLOCK_SIZE
    hand_off.blocks.num_tokens = num_tokens
    hand_off.blocks.block_ids.extend(range(_FIRST_BLOCK_ID, _FIRST_BLOCK_ID + -(-num_tokens // BLOCK_SIZE)))
    return response.SerializeToString()


def read_prefill_result(message: bytes) -> prefill_pb2.PrefillResult:
    """The one result of an answer."""
    return prefill_pb2.PrefillResponse.FromString(message).outputs[0].result


def first_delta(token_id: int) -> bytes:
    """The first token, as the client gets it."""
    response = router_pb2.GenerateResponse()
    response.delta.choice = response.delta.token_offset = 0
    response.delta.token_ids.append(token_id)
    response.delta.text = _TOKEN_TEXT
    return response.SerializeToString()


def read_delta(message: bytes) -> list[int]:
    """The tokens of a message to the client; none where it is no delta."""
    return list(router_pb2.GenerateResponse.FromString(message).delta.token_ids)


def decode_request(prompt: bytes, sampling: types_pb2.Sampling, result: prefill_pb2.PrefillResult) -> bytes:
    """The router's start of a decode, from what the prefill brought."""
    request = decode_pb2.DecodeRequest()
    _put_context(request.start.context)
    _put_generation(request.start.generation, prompt, sampling)
    request.start.generation.generated_token_ids = array("I", [result.token_id]).tobytes()
    request.start.hand_off.CopyFrom(result.hand_off)
    return request.SerializeToString()


def read_decode_start(message: bytes) -> decode_pb2.DecodeStart:
    """The start of a decode."""
    return decode_pb2.DecodeRequest.FromString(message).start


def list_token_ids(generation: types_pb2.Generation) -> list[int]:
    """Prompt and generated tokens."""
    return [*array("I", generation.prompt_token_ids), *array("I", generation.generated_token_ids)]


def pull_begin(hand_off: types_pb2.HandOff) -> bytes:
    """The question for all blocks of a hand-off."""
    request = transfer_pb2.PullRequest()
    ticket = request.begin.ticket
    ticket.hand_off_id, ticket.secret, ticket.worker_epoch = hand_off.hand_off_id, hand_off.secret, hand_off.epoch
    request.begin.pieces.extend(range(len(hand_off.blocks.block_ids)))
    request.begin.ways.extend([transfer_pb2.TRANSFER_WAY_SHM, transfer_pb2.TRANSFER_WAY_GRPC])
    request.begin.host.boot_id, request.begin.host.ipc_namespace = _BOOT_ID, _IPC_NAMESPACE
    return request.SerializeToString()


def pull_granted(begin: transfer_pb2.PullBegin) -> bytes:
    """Where each block is."""
    response = transfer_pb2.PullResponse()
    granted = response.granted
    granted.way, granted.piece_size_bytes = begin.ways[0], _PIECE_SIZE_BYTES
    granted.shm.socket_path, granted.shm.token = _SOCKET_PATH, _POOL_TOKEN
    granted.shm.pool_size_bytes = _POOL_SIZE_BYTES
    granted.shm.offsets.extend([(_FIRST_BLOCK_ID + piece) * _PIECE_SIZE_BYTES for piece in begin.pieces])
    return response.SerializeToString()


def read_granted_offsets(message: bytes) -> list[int]:
    """The offsets of a `granted`."""
    return list(transfer_pb2.PullResponse.FromString(message).granted.shm.offsets)


def pull_finish() -> bytes:
    """The word that all is read."""
    return transfer_pb2.PullRequest(finish=transfer_pb2.PullFinish()).SerializeToString()


def pull_finished() -> bytes:
    """The word that the source has let go."""
    return transfer_pb2.PullResponse(finished=transfer_pb2.PullFinished()).SerializeToString()


def read_finished(message: bytes) -> transfer_pb2.PullFinished:
    """That word, read."""
    return transfer_pb2.PullResponse.FromString(message).finished


def _put_context(context: types_pb2.RequestContext) -> None:
    context.request_id = _REQUEST_ID
    context.timeout.CopyFrom(Duration(seconds=59, nanos=990_000_000))
    context.router_id, context.router_request_number = _ROUTER_ID, 100


def _put_generation(generation: types_pb2.Generation, prompt: bytes, sampling: types_pb2.Sampling) -> None:
    generation.prompt_token_ids = prompt
    generation.sampling.CopyFrom(sampling)
    generation.seed = _SEED
    generation.output.SetInParent()
