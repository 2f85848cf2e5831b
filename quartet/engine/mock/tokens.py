"""Which token comes next, as a function of the request and the position: any attempt on any worker gives the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quartet.engine.running import RunningRequest
from quartet.kvcache.block_hash import pack_token_ids

_NUM_PROMPT_TOKENS = 32
_WORD_BYTES = 8


class MockTokens:
    """Chooses tokens of a list of words. Lives in the engine thread.

    An answer walks through the words by a stride. Where it begins and how far it steps come of the prompt's last
    tokens and, unless it is greedy, of the seed and the choice. Of the other sampling parameters these count:
    ``logit_bias``, by which the token with the highest one above 0 always comes, and those below 0 never do; and
    ``min_tokens``, before which no stop id comes. Temperature, filters and penalties change nothing.
    """

    def __init__(self, word_ids: Sequence[int]) -> None:
        self._word_ids = word_ids
        self._walks: dict[int, _Walk] = {}

    def next(self, requests: Sequence[RunningRequest]) -> list[int]:
        """The token that follows the ``seq`` of each of one step's ``requests``."""
        # Those of the last step are kept: the rest have ended, or can be made again.
        known = self._walks
        self._walks = {running.id: known.get(running.id) or _Walk(running, self._word_ids) for running in requests}
        return [self._walks[running.id].token_at(len(running.seq.token_ids)) for running in requests]


class _Walk:
    """One request's way through the words."""

    def __init__(self, running: RunningRequest, word_ids: Sequence[int]) -> None:
        self._word_ids = word_ids
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
        words, index = self._word_ids, self._first + position * self._stride
        token_id = words[index % len(words)]
        if token_id not in refused:
            return token_id
        # Where all are refused, one comes all the same: something has to.
        others = (words[(index + step) % len(words)] for step in range(1, len(words)))
        return next((other for other in others if other not in refused), token_id)


def _key(running: RunningRequest) -> tuple[int, int]:
    generation = running.request.generation
    # Greedy answers don't depend on the seed, as an engine's don't.
    seed, choice = (0, 0) if running.sampling.is_greedy else (generation.seed, generation.choice)
    prompt = generation.prompt_token_ids
    digest = hashlib.blake2b(pack_token_ids(tuple(prompt[-_NUM_PROMPT_TOKENS:])), digest_size=2 * _WORD_BYTES)
    digest.update(b"%d %d %d" % (len(prompt), seed, choice))
    key = digest.digest()
    return int.from_bytes(key[:_WORD_BYTES], "little"), int.from_bytes(key[_WORD_BYTES:], "little")
