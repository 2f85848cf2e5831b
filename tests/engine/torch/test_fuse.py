"""Layers run by hand compute what transformers' modules do; a model with an unknown part is not run by hand."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quartet.engine.torch import runner as runner_module
from quartet.engine.torch.attention import LayerAttention, PagedStep
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.decoder import Decoder, PackedLinear, PlainLinear, TransposedLinear, best_order, fuse
from quartet.engine.torch.runner import TorchRunner
from quartet.kvcache.layout import KvLayout
from tests.engine.torch.checkpoints import FAMILIES, make_config
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_oracle import greedy, ragged_prompts

BY_HAND = ("llama", "llama3_rope", "qwen2", "mistral", "qwen3")
_LAYOUT = KvLayout(model_fingerprint="", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=16, block_size=4)

Checkpoints = Callable[[str], Path]
ModelClass = Callable[[Any], transformers.PreTrainedModel]


def load(model_path: Path, dtype: str) -> TorchRunner:
    return TorchRunner(TorchEngineConfig(model_path=str(model_path), dtype=dtype, num_blocks=8, num_threads=1))


def try_to_fuse(model: transformers.PreTrainedModel, **attention: Any) -> Decoder | None:
    calls = [
        LayerAttention(**{"index": index, "scale": 0.25, "window": None, "softcap": None, "sinks": None, **attention})
        for index in range(3)
    ]
    return fuse(model, calls, _LAYOUT)


def _make_llama(config: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float64"), ("llama", "bfloat16"), ("gemma3", "float64"), *((family, "float32") for family in FAMILIES)],
)
def test_known_families_are_run_by_hand_and_no_others(family: str, dtype: str, checkpoint: Checkpoints) -> None:
    runner = load(checkpoint(family), dtype)
    assert isinstance(runner._compute, Decoder) == (family in BY_HAND)
    runner.close()


@pytest.mark.parametrize("family", BY_HAND)
async def test_the_modules_yield_the_same_tokens(
    family: str, checkpoint: Checkpoints, oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ragged_prompts()

    async def run(dtype: str) -> list[list[int]]:
        async with torch_engine(checkpoint(family), dtype=dtype, max_num_batched_tokens=40) as engine:
            return [outcome.token_ids for outcome in await run_all(engine, [greedy(prompt) for prompt in prompts])]

    for capability in ("AVX2", "AVX512"):  # what decides on the order of weights
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        for prompt, token_ids in zip(prompts, await run("float32"), strict=True):
            # Float32 may leave the exact tokens where two logits nearly tie: each is as good as the best one then.
            assert max(oracle(family).losses(prompt, token_ids)) < 1e-3
    by_hand = await run("float64")
    monkeypatch.setattr(runner_module, "fuse", lambda *_: None)
    assert by_hand == await run("float64")


class _OtherLlama(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A module that computes more than its structure shows."""


def _with_gelu(config: Any) -> transformers.PreTrainedModel:
    config.hidden_act = "gelu"
    return _make_llama(config)


def _with_another_module(config: Any) -> transformers.PreTrainedModel:
    model = _make_llama(config)
    model.model.layers[1].mlp.add_module("gate", nn.Identity())
    return model


def _with_another_linear(config: Any) -> transformers.PreTrainedModel:
    class Doubled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    model = _make_llama(config)
    model.model.layers[2].self_attn.o_proj = Doubled(64, 64)
    return model


def _with_a_hook(config: Any) -> transformers.PreTrainedModel:
    model = _make_llama(config)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "make",
    [_OtherLlama, _with_gelu, _with_another_module, _with_another_linear, _with_a_hook],
    ids=lambda f: f.__name__,
)
def test_a_model_that_differs_somewhere_is_left_alone(make: ModelClass) -> None:
    model = make(make_config("llama"))
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert try_to_fuse(model) is None
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_scores_that_sdpa_cannot_do_are_left_to_the_modules() -> None:
    model = _make_llama(make_config("llama"))
    assert try_to_fuse(model, softcap=30.0) is None
    assert try_to_fuse(model) is not None


def test_layers_that_yield_something_else_by_hand_are_not_run_so(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fuse_wrongly(model: Any, *_: object) -> Callable[[PagedStep], torch.Tensor]:
        return lambda step: torch.zeros(step.batch.positions.shape[1], model.config.vocab_size, dtype=torch.float64)

    monkeypatch.setattr(runner_module, "fuse", fuse_wrongly)
    with caplog.at_level(logging.WARNING):
        runner = load(checkpoint("llama"), "float64")
    assert "LlamaForCausalLM" in caplog.text
    assert isinstance(runner._compute, runner_module._Modules)
    runner.close()


def test_joined_weights_do_not_exist_twice() -> None:
    model = _make_llama(make_config("llama")).double()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert try_to_fuse(model) is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
    for layer in model.model.layers:
        for joined in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            storages = {layer.get_parameter(f"{name}.weight").untyped_storage().data_ptr() for name in joined}
            assert len(storages) == 1


def test_reordered_weights_replace_the_models_own(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Any]] = []

    def watch(model: Any, *others: Any) -> Decoder | None:
        models.append(weakref.ref(model.model.layers[0].mlp.down_proj.weight))
        return fuse(model, *others)

    monkeypatch.setattr(runner_module, "fuse", watch)
    runner = load(checkpoint("llama"), "float32")
    gc.collect()
    assert isinstance(runner._compute, Decoder)
    assert [model() for model in models] == [None]
    runner.close()


@pytest.mark.parametrize("order", [PackedLinear, TransposedLinear])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_a_product_in_another_order_is_the_plain_one(
    num_rows: int, has_bias: bool, order: type[PackedLinear] | type[TransposedLinear]
) -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48) if has_bias else None
    plain, reordered = PlainLinear(weight, bias), order(weight.clone(), bias)
    rows, sums = torch.randn(num_rows, 32), torch.randn(num_rows, 48)
    expected = torch.nn.functional.linear(rows, weight, bias)
    for linear in (plain, reordered):
        torch.testing.assert_close(linear(rows), expected, rtol=1e-5, atol=1e-5)
        added, written = sums.clone(), torch.full_like(sums, float("nan"))
        linear.add_to(added, rows)
        linear.write_to(written, rows)
        torch.testing.assert_close(added, sums + expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-5)
    twice = rows[:, :16].repeat(1, 2)
    torch.testing.assert_close(reordered(twice), plain(twice), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("capability", "order"), [("AVX2", TransposedLinear), ("AVX512", PackedLinear)])
def test_the_processor_decides_on_the_order_of_float32_weights_and_float64_stays_as_it_is(
    capability: str, order: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert best_order(torch.randn(48, 32)) is order
    assert best_order(torch.randn(48, 32, dtype=torch.float64)) is None
    assert best_order(torch.randn(48, 32, device="meta")) is None
