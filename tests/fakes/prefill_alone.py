"""``python -m tests.fakes.prefill_alone MODEL PROMPT``: the stand-in prefills twice, prints hand-offs, and waits."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    import tensorrt_llm  # found with the stand-in's path only
    from tensorrt_llm.llmapi import DisaggregatedParams

    llm = tensorrt_llm.LLM(sys.argv[1], cache_transceiver_config={"backend": "NIXL"}, disable_overlap_scheduler=True)
    for _ in range(2):
        only = DisaggregatedParams(request_type="context_only")
        result = llm.generate(sys.argv[2], tensorrt_llm.SamplingParams(), disaggregated_params=only)
        given = result.outputs[0].disaggregated_params
        line = (result.prompt_token_ids, given.first_gen_tokens, given.ctx_request_id, given.opaque_state)
        print(f"hand-off {line}", flush=True)
    signal.pause()
