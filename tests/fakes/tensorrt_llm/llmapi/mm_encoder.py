"""`MultimodalEncoder`: a model's vision part alone."""

from __future__ import annotations

import itertools
from typing import Any

from tensorrt_llm._stand_in import schema
from tensorrt_llm._stand_in.encoding import StandInEncoder
from tensorrt_llm._stand_in.request import Request
from tensorrt_llm._stand_in.schema import StandInError, signed
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.llmapi.llm import BaseLLM

_request_ids = itertools.count(1)
_OVERRIDES = schema.API["classes"]["MultimodalEncoder"]["overrides"]


class MultimodalEncoder(BaseLLM):
    """Loads the vision part and encodes pictures, one a request."""

    _engine_class = StandInEncoder

    @signed("MultimodalEncoder")
    def __init__(self, **arguments: Any) -> None:
        schema.check_type("dtype", schema.params_of("MultimodalEncoder")["dtype"]["type"], arguments["dtype"])
        arguments.setdefault("max_num_tokens", _OVERRIDES["max_num_tokens"])
        self._load({**arguments, "mm_encoder_only": _OVERRIDES["mm_encoder_only"]})

    @signed("MultimodalEncoder.generate_async")
    def generate_async(self, inputs: Any, sampling_params: Any) -> RequestOutput:
        """Submit one picture with the prompt it belongs to; the result's ``disaggregated_params`` is what counts."""
        executor = self._executor
        if executor is None:
            raise RuntimeError("LLM is shutting down")
        prompt = self._reader.read(inputs, None, None)
        if prompt.pixel_values is None:
            raise ValueError("Multimodal encoder only supports inputs with multi_modal_data")
        if len(prompt.item_hashes) != 1:
            raise StandInError("a request of several pictures gives one handle but several hashes: send one by one")
        if len(prompt.token_ids) > self.args.max_num_tokens:
            raise ValueError(f"the prompt should not exceed max_num_tokens ({self.args.max_num_tokens})")
        request_id = next(_request_ids)

        def abort() -> None:
            executor.abort(request)

        output = RequestOutput(request_id, prompt.text, prompt.token_ids, sampling_params, None, abort)
        request: Request = Request(
            request_id=request_id,
            prompt=prompt,
            params=sampling_params,
            streaming=False,
            stream_interval=1,
            disagg=None,
            output=output,
            rank=0,
            salt="",
            adapter_path=None,
            guide=None,
            stop_words=[],
        )
        return self._submit(request, {"inputs": inputs, "sampling_params": sampling_params})

    @signed("MultimodalEncoder.generate")
    def generate(self, inputs: Any, use_tqdm: bool) -> RequestOutput | list[RequestOutput]:
        """Encode, blocking."""
        del use_tqdm
        if not isinstance(inputs, list):
            output: RequestOutput = self.generate_async(inputs)
            return output.result()
        return [output.result() for output in [self.generate_async(one) for one in inputs]]
