"""Domain to proto (``to_*``) and back (``from_*``).

What comes from the wire is checked here: a missing or impossible field raises ``InvalidRequestError`` whose ``field``
is its path in the message, or ``ProtocolError`` where a peer of ours sent nonsense.
"""

from quartet.events.wire import from_worker_load, to_worker_load
from quartet.rpc.convert.generation import (
    from_engine_finish_reason,
    from_finish_reason,
    from_generation,
    from_output_options,
    from_sampling,
    from_token_logprobs,
    to_finish_reason,
    to_generation,
    to_output_options,
    to_sampling,
    to_token_logprobs,
    unpack_token_ids,
)
from quartet.rpc.convert.hand_off import from_hand_off, from_kv_layout, to_hand_off, to_kv_layout
from quartet.rpc.convert.media import (
    from_media_file,
    from_media_input,
    from_media_part,
    from_media_size,
    to_media_file,
    to_media_input,
    to_media_part,
    to_media_size,
)
from quartet.rpc.convert.outputs import (
    from_prefill_result,
    from_slot_started,
    to_prefill_result,
    to_slot_logprobs,
    to_slot_started,
)
from quartet.rpc.convert.starts import (
    from_decode_start,
    from_prefill_start,
    from_request_context,
    to_decode_start,
    to_engine_request,
    to_prefill_start,
    to_request_context,
)
from quartet.rpc.convert.workers import (
    from_host_identity,
    from_transfer_ways,
    from_worker_record,
    from_worker_role,
    rank_load,
    to_host_identity,
    to_transfer_ways,
    to_worker_record,
    to_worker_role,
)

__all__ = [
    "from_decode_start",
    "from_engine_finish_reason",
    "from_finish_reason",
    "from_generation",
    "from_hand_off",
    "from_host_identity",
    "from_kv_layout",
    "from_media_file",
    "from_media_input",
    "from_media_part",
    "from_media_size",
    "from_output_options",
    "from_prefill_result",
    "from_prefill_start",
    "from_request_context",
    "from_sampling",
    "from_slot_started",
    "from_token_logprobs",
    "from_transfer_ways",
    "from_worker_load",
    "from_worker_record",
    "from_worker_role",
    "rank_load",
    "to_decode_start",
    "to_engine_request",
    "to_finish_reason",
    "to_generation",
    "to_hand_off",
    "to_host_identity",
    "to_kv_layout",
    "to_media_file",
    "to_media_input",
    "to_media_part",
    "to_media_size",
    "to_output_options",
    "to_prefill_result",
    "to_prefill_start",
    "to_request_context",
    "to_sampling",
    "to_slot_logprobs",
    "to_slot_started",
    "to_token_logprobs",
    "to_transfer_ways",
    "to_worker_load",
    "to_worker_record",
    "to_worker_role",
    "unpack_token_ids",
]
