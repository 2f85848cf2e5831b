"""`LLM`: the part of TensorRT-LLM that everything goes through."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._stand_in import schema
from tensorrt_llm._stand_in.control import Call, EngineControl, control
from tensorrt_llm._stand_in.engine import StandInEngine
from tensorrt_llm._stand_in.feeds import Feed, IterationResult
from tensorrt_llm._stand_in.launch import check_launch
from tensorrt_llm._stand_in.loop import EngineLoop
from tensorrt_llm._stand_in.prompts import PromptReader
from tensorrt_llm._stand_in.request import Request
from tensorrt_llm._stand_in.schema import StandInError, signed
from tensorrt_llm._stand_in.submission import make_request
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import Weights, load_tokenizer, load_weights
from tensorrt_llm._torch.auto_deploy.llm_args import LlmArgs as AutoDeployArgs
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.llmapi.llm_args import LoadFormat, TorchLlmArgs

_BACKENDS = {"pytorch": TorchLlmArgs, "_autodeploy": AutoDeployArgs}
_request_ids = itertools.count(1)


class BaseLLM:
    """What `LLM` and `MultimodalEncoder` share: arguments, loading, the end."""

    _engine_class: Any = None

    def _load(self, arguments: dict[str, Any]) -> None:
        """Check ``arguments`` and load; blocks for as long as that takes."""
        self._executor: EngineLoop | None = None
        backend = arguments.pop("backend", "pytorch")
        if backend not in _BACKENDS:
            raise ValueError(f"Unsupported backend: {backend}")
        arguments.pop("_mpi_session", None)
        self._check_names(backend, arguments)
        self.args = _BACKENDS[backend](**arguments)
        if (num_ranks := _num_ranks(self.args)) > SWITCHES.num_gpus:
            raise RuntimeError(f"Only {SWITCHES.num_gpus} GPUs are available, but {num_ranks} are required.")
        check_launch(num_ranks)
        self.llm_id = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        control.pass_load()
        weights = load_weights(str(self.args.model), is_dummy=self.args.load_format is LoadFormat.DUMMY)
        self.tokenizer = self._tokenizer(weights)
        self.input_processor = SimpleNamespace(support_mm_disagg=weights.has_vision and SWITCHES.support_mm_disagg)
        self._reader = PromptReader(weights, self.tokenizer)
        engine = self._engine_class(weights, _filled(self.args))
        self._executor = engine
        self._control = EngineControl(self, engine)
        control.engines.append(self._control)
        engine.start()
        atexit.register(self.shutdown)

    def _check_names(self, backend: str, arguments: dict[str, Any]) -> None:
        rejected = schema.API["rejected_keywords"]["torch_backend"]["names"]
        if backend == "pytorch" and (names := [name for name in arguments if name in rejected]):
            raise ValueError(f"The following arguments are not supported by the PyTorch backend: {', '.join(names)}")
        for name in arguments:
            # 1.4 drops the name of its only sampler, or refuses another's by itself.
            is_dropped = SWITCHES.is_1_4 and name == "sampler_type"
            if name not in _BACKENDS[backend].model_fields and not is_dropped:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")

    def _tokenizer(self, weights: Weights) -> Any:
        if self.args.skip_tokenizer_init:
            return None
        given = self.args.tokenizer
        return given if hasattr(given, "decode") else load_tokenizer(str(given or weights.path))

    def shutdown(self) -> None:
        """End the engine; may be called again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
            atexit.unregister(self.shutdown)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")

    def _submit(self, request: Request, arguments: dict[str, Any]) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        self._control.calls.append(Call(request.request_id, arguments))
        self._executor.submit(request)
        return request.output


class LLM(BaseLLM):
    """Loads a model and generates."""

    _engine_class = StandInEngine

    @signed("LLM")
    def __init__(self, **arguments: Any) -> None:
        self._load(arguments)
        engine: Any = self._executor
        self._events = Feed(engine.events, must_have_begun=True)
        self._stats = Feed(engine.stats, must_have_begun=False)

    @signed("LLM.generate_async")
    def generate_async(self, **given: Any) -> RequestOutput:
        """Submit one request, whose prompt is prepared in this thread, and return its handle at once."""
        engine = self._executor
        if not isinstance(engine, StandInEngine) or engine.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        request, arguments = make_request(
            next(_request_ids), given, _filled(self.args), engine, self._reader, self.tokenizer
        )
        self._events.begin()
        self._stats.begin()
        return self._submit(request, arguments)

    @signed("LLM.generate")
    def generate(self, **given: Any) -> RequestOutput | list[RequestOutput]:
        """Generate, blocking; a list of prompts gives a list of results, in order."""
        del given["use_tqdm"]
        inputs = given.pop("inputs")
        is_one = isinstance(inputs, str | dict) or all(type(token_id) is int for token_id in inputs)
        if is_one:
            output: RequestOutput = self.generate_async(inputs, **given)
            return output.result()
        outputs = [
            self.generate_async(one, **{name: _of_item(name, value, number) for name, value in given.items()})
            for number, one in enumerate(inputs)
        ]
        return [output.result() for output in outputs]

    @signed("LLM.get_kv_cache_events_async")
    def get_kv_cache_events_async(self, timeout: float | None) -> IterationResult:
        """Return an iterator of KV events."""
        return self._events.fetch_async(timeout)

    @signed("LLM.get_kv_cache_events")
    def get_kv_cache_events(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return KV events."""
        return self._events.fetch(timeout)

    @signed("LLM.get_stats_async")
    def get_stats_async(self, timeout: float | None) -> IterationResult:
        """Return an iterator of steps' statistics."""
        return self._stats.fetch_async(timeout)

    @signed("LLM.get_stats")
    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return steps' statistics."""
        return self._stats.fetch(timeout)

    if SWITCHES.kv_cache_capacity:

        def get_kv_cache_capacity(self) -> dict[str, int]:
            """Return how much the KV cache of a rank holds."""
            engine: Any = self._executor
            stats = engine.ranks[0].kv_stats()
            num_blocks, block_size = stats["maxNumBlocks"], stats["tokensPerBlock"]
            return {
                "maxNumBlocks": num_blocks,
                "tokensPerBlock": block_size,
                "maxNumTokens": num_blocks * block_size,
            }

    if SWITCHES.check_health:

        def _check_health(self) -> bool:
            return self._executor is not None and not self._executor.is_shutdown()


def _filled(args: Any) -> Any:
    """AutoDeploy's arguments may lack what the engine reads: then the PyTorch backend's default holds."""
    defaults = {name: param.get("default") for name, param in schema.params_of("TorchLlmArgs").items()}
    return SimpleNamespace(**{**defaults, **{name: getattr(args, name) for name in type(args).model_fields}})


def _num_ranks(args: Any) -> int:
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size, args.context_parallel_size)
    return int(math.prod(sizes) * getattr(args, "world_size", 1))


def _of_item(name: str, value: Any, number: int) -> Any:
    """One prompt's share of what was given for all; one object of parameters is not for several requests."""
    if name == "sampling_params" and value is not None and not isinstance(value, list):
        raise StandInError("give each prompt a SamplingParams of its own")
    return value[number] if isinstance(value, list) else value
