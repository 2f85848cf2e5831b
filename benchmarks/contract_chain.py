"""The bare chain with the contract's messages: built and parsed by the generated code, and nothing else done.

The same way as ``benchmarks.bare_chain`` draws, in the same processes. What any implementation of the contracts has to
do on it comes in: each message is made of its fields and read by whom it is for, the router writes the first token to
the client before decode's start, and the prompt becomes a list in the decode's thread, as an engine appends to it.
There are no checks, no scheduler, no block pool and no metrics, and nothing is copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from benchmarks import contract_messages
from benchmarks.bare_chain_parts import (
    Call,
    Context,
    StepThread,
    after_stamp,
    between_ms,
    read_bytes,
    stamp,
    step,
)
from quartet.v1 import transfer_pb2


class ContractPrefill:
    """The prefill's end of the streams."""

    def __init__(self, thread: StepThread) -> None:
        """Have the steps in ``thread``."""
        self._thread = thread

    async def prefill(self, _requests: object, context: Context) -> None:
        """Answer each start after a step, with a hand-off; the step's end is stamped before the message."""
        while isinstance(message := await context.read(), bytes):
            num_tokens = len(contract_messages.read_prefill_prompt(message))
            ended = await self._thread.run(step)
            await context.write(ended + contract_messages.prefill_response(num_tokens))

    async def pull(self, _requests: object, context: Context) -> None:
        """Grant what is asked for, then let go."""
        while isinstance(message := await context.read(), bytes):
            request = transfer_pb2.PullRequest.FromString(message)
            if request.WhichOneof("message") == "begin":
                await context.write(contract_messages.pull_granted(request.begin))
            else:
                await context.write(contract_messages.pull_finished())


class ContractDecode:
    """The decode's end of the streams."""

    def __init__(self, thread: StepThread, pull: Call) -> None:
        """Have the steps in ``thread``; ``pull`` is an open stream to the prefill."""
        self._thread = thread
        self._pull = pull

    async def decode(self, _requests: object, context: Context) -> None:
        """Answer each start with the stamp of the first step that has it."""
        while isinstance(message := await context.read(), bytes):
            start = contract_messages.read_decode_start(message)
            token_ids = await self._thread.run(partial(contract_messages.list_token_ids, start.generation))
            assert token_ids, "a request has a prompt"
            answers = asyncio.ensure_future(self._read_answers())
            await self._pull.write(contract_messages.pull_begin(start.hand_off))
            await self._pull.write(contract_messages.pull_finish())
            await answers
            await context.write(await self._thread.run(stamp))

    async def _read_answers(self) -> list[int]:
        """Where the blocks are, once the source has let go."""
        offsets = contract_messages.read_granted_offsets(await read_bytes(self._pull))
        contract_messages.read_finished(await read_bytes(self._pull))
        return offsets


class ContractRouter:
    """The router's end of the streams."""

    def __init__(self, prefill: Call, decode: Call) -> None:
        """Go over these open streams, one request at a time."""
        self._prefill = prefill
        self._decode = decode

    async def generate(self, _requests: object, context: Context) -> None:
        """Answer one request with `accepted` and its first token, then with the chain's milliseconds as text."""
        start = contract_messages.read_generate_start(await read_bytes(context))
        prompt = contract_messages.pack_prompt(start)
        await context.write(contract_messages.accepted(len(start.token_ids.ids)))
        await self._prefill.write(contract_messages.prefill_request(prompt, start.sampling))
        answer = await read_bytes(self._prefill)
        result = contract_messages.read_prefill_result(after_stamp(answer))
        telling = asyncio.ensure_future(_write(context, contract_messages.first_delta(result.token_id)))
        # The write begins here, and nobody waits for its end before going on.
        await asyncio.sleep(0)
        await self._decode.write(contract_messages.decode_request(prompt, start.sampling, result))
        joined = await read_bytes(self._decode)
        await telling
        await context.write(str(between_ms(answer, joined)).encode())


async def ask(call: Call, token_ids: Sequence[int]) -> float:
    """Be the client of ``ContractGenerate`` with that prompt, once over ``call``: the chain's milliseconds.

    Raises:
        EOFError, grpc.aio.AioRpcError: a process is gone.
    """
    await call.write(contract_messages.generate_request(token_ids))
    await call.done_writing()
    while not contract_messages.read_delta(await read_bytes(call)):
        pass
    return float(await read_bytes(call))


async def _write(context: Context, message: bytes) -> None:
    await context.write(message)
