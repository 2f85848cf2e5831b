"""Steps that can be told beforehand, all at once: each gives every running request one token and does nothing else.

For a replay in virtual time, where most steps are like that. What the scheduler and the block pool hold afterwards is
what as many calls of ``schedule`` and ``update`` would have left.
"""

from __future__ import annotations

from quartet.engine.running import RunningRequest
from quartet.engine.scheduler import Scheduler
from quartet.kvcache.block_pool import BlockManager


def num_quiet_steps(scheduler: Scheduler, block_size: int) -> int:
    """How many of the next steps are quiet, as far as no token ends an output; 0 where something else comes first.

    Something else: somebody waits, pulls or prefills, ends, or needs a block.
    """
    if scheduler.waiting or not scheduler.running or scheduler.num_running > len(scheduler.running):
        return 0
    return max(0, min(_num_quiet_tokens(running, block_size) for running in scheduler.running))


def take_quiet_steps(scheduler: Scheduler, blocks: BlockManager, num_steps: int, token_id: int) -> None:
    """Take as many quiet steps, each of which samples ``token_id`` for everybody."""
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
