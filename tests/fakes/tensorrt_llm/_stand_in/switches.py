"""What the description of the API leaves open: an adapter must be right with each of these either way."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Switches:
    """One possible release, on one possible machine.

    Attributes:
        version: of the release; 1.4 has what came with 1.3 and 1.4, as far as the adapter meets it, and none of what
            is gone.
        num_gpus: GPUs that are visible; without any not even arguments can be made.
        num_kv_blocks: blocks of KV on the GPU, unless ``KvCacheConfig.max_tokens`` says less.
        disagg_request_id, first_gen_log_probs, mrope_handles: `DisaggregatedParams` has these fields.
        check_health: `LLM._check_health` exists.
        fatal_error: the executor notes an error that ended it as ``_fatal_error``; else as the first of a queue.
        kv_cache_capacity: `LLM.get_kv_cache_capacity` exists.
        ids_in_vocabulary: tokens of pictures have the placeholder's id, in place of ids beyond the vocabulary.
        several_handles: the input processor takes more than one handle.
        connector_names: `KvCacheConnectorConfig` takes the name of a connector, in place of a module and classes.
        kv_event_form: how events and statistics are fetched.
        kv_event_lists: an iterator of events yields lists of them.
        mm_keys: events of stored blocks name pictures under this key.
        no_kv_cache_stats: statistics lack ``kvCacheStats``.
        long_prompt_error: what a prompt beyond ``max_num_tokens`` raises.
        context_finish: how a context-only request ends whose answer goes on.
        end_id_in_tokens: the end id is an answer's last token.
        logprobs_as_floats: one number a token in place of a dict.
        handles_in_tuple: a result's handles come in a tuple of one list.
        lower_case_transceivers: transceivers may be named in lower case.
        result_timeout_works: `RequestOutput.result` heeds its ``timeout``.
        single_use_state: an opaque state is gone once pulled.
        abort_pins_state: aborting a pull leaves prefill's blocks held until their time is over.
        support_mm_disagg: the model's input processor takes embeddings of an encoder.
        embeddings_need_special_tokens: embeddings are mappings that say where special tokens go, as Llama 4 has them.
        reads_processor_options: the model's input processor reads `mm_processor_kwargs`; LLaVA's does not.
        autodeploy_from_torch: AutoDeploy's arguments derive from the PyTorch backend's.
    """

    version: Literal["1.2.1", "1.4.0rc1"] = "1.2.1"
    num_gpus: int = 8
    num_kv_blocks: int = 512
    disagg_request_id: bool = False
    first_gen_log_probs: bool = True
    mrope_handles: bool = True
    check_health: bool = False
    fatal_error: bool = False
    kv_cache_capacity: bool = False
    ids_in_vocabulary: bool = False
    several_handles: bool = False
    connector_names: bool = False
    kv_event_form: Literal["queue", "rpc"] = "rpc"
    kv_event_lists: bool = False
    mm_keys: bool = False
    no_kv_cache_stats: bool = False
    long_prompt_error: Literal["request_error", "value_error"] = "request_error"
    context_finish: Literal["length", "not_finished"] = "length"
    end_id_in_tokens: bool = True
    logprobs_as_floats: bool = False
    handles_in_tuple: bool = False
    lower_case_transceivers: bool = False
    result_timeout_works: bool = False
    single_use_state: bool = True
    abort_pins_state: bool = True
    support_mm_disagg: bool = True
    embeddings_need_special_tokens: bool = False
    reads_processor_options: bool = False
    autodeploy_from_torch: bool = False

    @property
    def is_1_4(self) -> bool:
        """Whether this is the line after 1.2."""
        return self.version.startswith("1.4")


#: What 1.2 lacks, and public sources of the line after it have. The two about pictures are so in the input processors
#: of Qwen2-VL and Qwen3-VL, of which `LLM` asks `build_disagg_prefill_multimodal_inputs`; LLaVA's was not seen there.
_OF_1_4 = {
    "check_health": True,
    "fatal_error": True,
    "kv_cache_capacity": True,
    "connector_names": True,
    "disagg_request_id": True,
    "ids_in_vocabulary": True,
    "several_handles": True,
}


def _chosen() -> Switches:
    given = json.loads(os.environ.get("TENSORRT_LLM_STAND_IN", "{}"))
    switches = Switches(**given)
    return replace(switches, **{**_OF_1_4, **given}) if switches.is_1_4 else switches


SWITCHES = _chosen()
