"""A ``ModelRunner`` whose steps take the time of a model, over a real pool of tiny blocks.

``StepPacer`` makes steps last as long as they should, ``MockTokens`` chooses their tokens, and ``BlockStamps`` marks
blocks, so that a block that was mixed up or damaged by a transfer is found. ``num_quiet_steps`` and
``take_quiet_steps`` skip many steps at once, for replays in virtual time.
"""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from quartet.engine.mock.model import MockEngineConfig, MockModel
from quartet.engine.runner import RunningRequest, SampledToken, ScheduledChunk, StepLauncher
from quartet.engine.scheduler import Scheduler
from quartet.engine.step_engine import ALL_SAMPLING_FIELDS
from quartet.engine.step_time import step_work
from quartet.errors import ModelFilesError
from quartet.kvcache.block_hash import pack_token_ids
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import EmbeddingMemory, PoolMemory

#: What requests may ask for: all but log probabilities, as no logits are computed.
SAMPLING_FIELDS = ALL_SAMPLING_FIELDS - {"logprobs", "num_prompt_logprobs"}

_MS_PER_S = 1e3

# Bytes of K, and of V, of one token: enough for the stamps, whatever the block size.
_TOKEN_BYTES = 4

# Two steps without a pause have only this code between them; after a longer gap there was nothing to do.
_MAX_GAP_S = 0.001

# Most of a delay that later steps make up for: a process stopped for a minute must not rush through a minute's steps.
_MAX_LATENESS_S = 0.1

_NUM_PROMPT_TOKENS = 32

_WORD_BYTES = 8


def rank_loader(config: MockEngineConfig) -> Callable[[int], MockRunner]:
    """A function that makes a rank's runner; its first call, which must end before the next, loads what ranks share.

    It raises ``ModelFilesError`` as ``SharedByRanks`` does.
    """
    shared = cache(lambda: SharedByRanks(config))
    return lambda rank: MockRunner(shared(), rank)


class MockRunner:
    """Gives out tokens of ``MockTokens`` in the time of ``StepTiming``. Needs neither torch nor weights.

    It writes ``BlockStamps`` to blocks, so a block that was mixed up or damaged by a transfer ends the engine.

    Attributes:
        layout: of one block.
        memory: the bytes of all ranks' pools.
        num_blocks: of this rank's pool.
        eos_token_ids: tokens that end an output; they are chosen only if a request's ``logit_bias`` favours them.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
    """

    embeddings: EmbeddingMemory | None = None
    placeholder_id: int | None = None
    launcher: StepLauncher | None = None

    def __init__(self, shared: SharedByRanks, rank: int = 0, pacer: StepPacer | None = None) -> None:
        """Compute for ``rank``; the runner of rank 0 closes what is shared."""
        config, model = shared.config, shared.model
        self.layout = shared.layout
        self.num_blocks = config.num_blocks
        self.max_model_len = shared.max_model_len
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.memory: PoolMemory | None = shared.memory
        self._stamps = BlockStamps(shared.memory, config.block_size, rank * config.num_blocks)
        self._tokens = MockTokens(model.word_ids, model.script)
        self._settings = config.settings
        self._pacer = pacer or StepPacer()
        self._is_owner = rank == 0
        self._last_ids: frozenset[int] = frozenset()

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Stamp the blocks that the chunks fill, choose a token for each that samples, take a step's time.

        Raises:
            WrongBlocksError: a block's stamp is not that of its request's tokens.
        """
        ids = frozenset(chunk.running.id for chunk in chunks)
        self._pacer.begin(is_continued=not ids.isdisjoint(self._last_ids))
        self._last_ids = ids
        self._stamps.take(chunks)
        token_ids = self._tokens.next([chunk.running for chunk in chunks if chunk.samples])
        self._pacer.end(self.step_s(chunks))
        return [SampledToken(token_id) for token_id in token_ids]

    def step_s(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Seconds that a step of ``chunks`` takes."""
        work = step_work(chunks)
        step_ms = self._settings.timing.step_ms(work.num_prompt_tokens, work.num_context_tokens)
        return max(0.0, step_ms) / _MS_PER_S / self._settings.speed_up

    def close(self) -> None:
        """Give the pools back, if this is the runner of rank 0."""
        if self._is_owner and self.memory is not None:
            self.memory.close()


class SharedByRanks:
    """What the ranks of one mock engine share: the model, and one memory with the blocks of all ranks in turn."""

    def __init__(self, config: MockEngineConfig) -> None:
        """Read the model's text files, reserve the pools.

        Raises:
            ModelFilesError: files are missing or malformed, or neither they nor ``config`` give the longest sequence.
        """
        self.config = config
        self.model = MockModel.load(Path(config.model_path), config.settings.says)
        max_model_len = config.max_model_len or self.model.max_model_len
        if max_model_len is None:
            raise ModelFilesError("set max_model_len: config.json has no max_position_embeddings")
        self.max_model_len = max_model_len
        self.layout = mock_layout(self.model.fingerprint, config.block_size)
        self.memory = PoolMemory(config.data_parallel_size * config.num_blocks, self.layout.piece_size_bytes)


def mock_layout(fingerprint: str, block_size: int) -> KvLayout:
    """Blocks of 8 bytes a token."""
    return KvLayout(
        model_fingerprint=fingerprint,
        dtype="uint8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=_TOKEN_BYTES,
        block_size=block_size,
    )


class StepPacer:
    """Ends each step when it is due; a step that follows at once counts from the due time, not from the real one.

    So neither late wake-ups nor the time between steps add up, as long as the machine keeps up on the whole.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._due_at = -math.inf
        self._began_at = -math.inf

    def begin(self, *, is_continued: bool) -> None:
        """A step begins; ``is_continued``: some of its requests were in the last one, so there was no pause."""
        now = self._clock()
        if is_continued or now - self._due_at <= _MAX_GAP_S:
            self._began_at = max(self._due_at, now - _MAX_LATENESS_S)
        else:
            self._began_at = now

    def end(self, duration_s: float) -> None:
        """Sleep until the step, which takes ``duration_s``, is over."""
        self._due_at = self._began_at + duration_s
        remaining_s = self._due_at - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)


class MockTokens:
    """Chooses tokens from a list of words, as a function of request and position only. Lives in the engine thread.

    So any attempt on any worker gives the same tokens. An answer walks through the words by a stride. Its begin and its
    stride are a hash of the prompt's last tokens and, unless it is greedy, of the seed and the choice. Of the other
    sampling parameters two count: with ``logit_bias``, the token with the highest bias above 0 is always chosen, and
    tokens with a bias below 0 never are; and before ``min_tokens`` no stop id is chosen. Temperature, filters and
    penalties change nothing.
    """

    def __init__(self, word_ids: Sequence[int], script: Sequence[int] = ()) -> None:
        """Walk through ``word_ids``; the first tokens of every answer are ``script``."""
        self._word_ids = word_ids
        self._script = script
        self._walks: dict[int, _Walk] = {}

    def next(self, requests: Sequence[RunningRequest]) -> list[int]:
        """The token that follows the ``seq`` of each of one step's ``requests``."""
        # Keep only the walks of this step: other requests have ended, or their walk can be made again.
        known = self._walks
        self._walks = {
            running.id: known.get(running.id) or _Walk(running, self._word_ids, self._script) for running in requests
        }
        return [self._walks[running.id].token_at(len(running.seq.token_ids)) for running in requests]


class BlockStamps:
    """Stamps each full block with a digest of its tokens, and checks the stamps of the blocks of new requests.

    The stamp is in the first and in the last word of a block, so that a block that was moved only in part is found too.
    """

    def __init__(self, memory: PoolMemory, block_size: int, first_block: int = 0) -> None:
        """``memory``: of blocks of ``block_size`` tokens, whose bytes are whole words of 4, two at least.

        The rank's block 0 is block ``first_block`` of ``memory``.
        """
        pool = np.frombuffer(memory.view, np.uint32).reshape(memory.num_blocks, -1)[first_block:]
        self._first_words, self._last_words = pool[:, 0], pool[:, -1]
        self._block_size = block_size
        self._last_ids: frozenset[int] = frozenset()

    def take(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Stamp the blocks that one step's ``chunks`` fill; of new requests, first check the blocks before the chunk.

        Raises:
            WrongBlocksError: a block's stamp is not that of its request's tokens, whichever worker computed it.
        """
        last_ids, self._last_ids = self._last_ids, frozenset(chunk.running.id for chunk in chunks)
        for chunk in chunks:
            if chunk.running.id not in last_ids:
                self._check(chunk.running, chunk.first_position // self._block_size)
            self._stamp(chunk)

    def _stamp(self, chunk: ScheduledChunk) -> None:
        size, seq = self._block_size, chunk.running.seq
        first, end = chunk.first_position // size, (chunk.first_position + chunk.num_tokens) // size
        if first < end:
            blocks = seq.block_table[first:end]
            self._first_words[blocks] = self._last_words[blocks] = _stamps(
                seq.token_ids[first * size : end * size], size
            )

    def _check(self, running: RunningRequest, num_full: int) -> None:
        blocks = running.seq.block_table[:num_full]
        expected = _stamps(running.seq.token_ids[: num_full * self._block_size], self._block_size)
        wrong = (self._first_words[blocks] != expected) | (self._last_words[blocks] != expected)
        if wrong.any():
            raise WrongBlocksError(f"blocks {np.flatnonzero(wrong).tolist()} of the sequence hold something else")


class WrongBlocksError(Exception):
    """Blocks do not hold the tokens of the request that has them."""


def num_quiet_steps(scheduler: Scheduler, block_size: int) -> int:
    """How many of the next steps are quiet: each gives every running request one token and does nothing else.

    A step is not quiet if a request waits, pulls, prefills, ends or needs a block. Tokens that end an output are the
    caller's to check. In a replay in virtual time most steps are quiet.
    """
    if scheduler.waiting or not scheduler.running or scheduler.num_running > len(scheduler.running):
        return 0
    return max(0, min(_num_quiet_tokens(running, block_size) for running in scheduler.running))


def take_quiet_steps(scheduler: Scheduler, blocks: BlockManager, num_steps: int, token_id: int) -> None:
    """Take ``num_steps`` quiet steps at once; each samples ``token_id`` for every request.

    Scheduler and block pool end up as ``num_steps`` calls of ``schedule`` and ``update`` would leave them.
    """
    for running in scheduler.running:
        seq = running.seq
        seq.token_ids.extend([token_id] * num_steps)
        seq.num_computed_tokens += num_steps
        blocks.commit(seq)


def _num_quiet_tokens(running: RunningRequest, block_size: int) -> int:
    if not running.is_decoding or not running.is_started:
        return 0
    num_left = running.max_output_tokens - running.num_output_tokens - 1
    # A step needs room for the tokens that the sequence has when it begins.
    return min(num_left, len(running.seq.block_table) * block_size - len(running.seq) + 1)


class _Walk:
    """One request's way through the words."""

    def __init__(self, running: RunningRequest, word_ids: Sequence[int], script: Sequence[int]) -> None:
        self._word_ids = word_ids
        self._script = script
        self._num_prompt_tokens = running.num_prompt_tokens
        self._first, stride = _key(running)
        self._stride = 1 + stride % max(1, len(word_ids) - 1)
        bias = running.sampling.logit_bias
        self._favourites = sorted((token for token in bias if bias[token] > 0), key=lambda token: (-bias[token], token))
        self._never = frozenset(token for token in bias if bias[token] < 0)
        self._not_early = self._never | running.stop_ids
        self._early_end = running.num_prompt_tokens + running.sampling.min_tokens

    def token_at(self, position: int) -> int:
        """The token at ``position`` of the sequence."""
        refused = self._not_early if position < self._early_end else self._never
        for token_id in self._favourites:
            if token_id not in refused:
                return token_id
        number = position - self._num_prompt_tokens
        if number < len(self._script) and self._script[number] not in refused:
            return self._script[number]
        words, index = self._word_ids, self._first + position * self._stride
        token_id = words[index % len(words)]
        if token_id not in refused:
            return token_id
        # If all words are refused, choose one all the same.
        others = (words[(index + step) % len(words)] for step in range(1, len(words)))
        return next((other for other in others if other not in refused), token_id)


def _key(running: RunningRequest) -> tuple[int, int]:
    generation = running.request.generation
    # Greedy answers do not depend on the seed, as with a real engine.
    seed, choice = (0, 0) if running.sampling.is_greedy else (generation.seed, generation.choice)
    prompt = generation.prompt_token_ids
    digest = hashlib.blake2b(pack_token_ids(tuple(prompt[-_NUM_PROMPT_TOKENS:])), digest_size=2 * _WORD_BYTES)
    digest.update(b"%d %d %d" % (len(prompt), seed, choice))
    key = digest.digest()
    return int.from_bytes(key[:_WORD_BYTES], "little"), int.from_bytes(key[_WORD_BYTES:], "little")


def _stamps(token_ids: Sequence[int], block_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One digest a block, never 0: unwritten blocks hold 0."""
    tokens = np.asarray(token_ids, np.uint32).reshape(-1, block_size)
    return np.array([zlib.crc32(block.data) or 1 for block in tokens], np.uint32)
