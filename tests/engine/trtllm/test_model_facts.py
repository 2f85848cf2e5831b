"""Which workers are of one pool: those that can go on with each other's prompts."""

from __future__ import annotations

import pytest

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.trtllm.arguments import LlmArguments
from quartet.engine.trtllm.model_facts import ModelFacts
from tests.tiny import CHECKPOINT

DTYPES = ("auto", "float32", "bfloat16", "fp8")


def fingerprint(kv_dtype: str) -> str:
    return ModelFacts.read(str(CHECKPOINT), LlmArguments(values={}, kv_dtype=kv_dtype)).fingerprint


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_no_other_engine_of_the_same_model_and_dtype_is_of_the_pool(kv_dtype: str) -> None:
    assert fingerprint(kv_dtype) != model_fingerprint(CHECKPOINT, kv_dtype)


def test_workers_are_of_one_pool_if_their_caches_are_alike() -> None:
    assert fingerprint("fp8") == fingerprint("fp8")
    assert len({fingerprint(kv_dtype) for kv_dtype in DTYPES}) == len(DTYPES)
