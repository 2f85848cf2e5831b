"""What the server says of itself: models, workers, health; and the tokenizers of models, for clients that count."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.api.anthropic.requests import read_count
from quartet.api.fleet import WorkerState
from quartet.api.openai.fields import Reader, anything, boolean, read_fields, text
from quartet.api.openai.json_parts import tokens_json
from quartet.api.openai.requests import Caller, read_chat, read_completion, read_token_ids
from quartet.api.request import GenerateStart, TokenPrompt, check_start
from quartet.discovery.base import Role
from quartet.errors import InvalidRequestError
from router.context import RouterContext
from router.http.body import Bodies
from router.prepare import check_chat_of_model, check_ids, find_pool, max_sequence_tokens, tokenize
from router.workers import Pool, WorkerTable

# When this process began to know models: OpenAI's clients want a date of each.
_STARTED_AT = int(time.time())
_DETOKENIZE: Mapping[str, Reader] = {"model": text, "tokens": anything}


def list_models(table: WorkerTable) -> dict[str, Any]:
    """GET /v1/models."""
    pools = {pool.key.model_name: pool for pool in table.pools(time.monotonic())}
    adapters = [_adapter(pool, name) for pool in pools.values() for name in sorted(pool.adapters)]
    return {"object": "list", "data": [*map(_model, pools.values()), *adapters]}


def model_names(table: WorkerTable) -> list[str]:
    """The names that GET /v1/models lists, each once."""
    return list(dict.fromkeys(model["id"] for model in list_models(table)["data"]))


def show_model(context: RouterContext, name: str) -> dict[str, Any]:
    """GET /v1/models/NAME, of a model or an adapter. Raises ``ModelNotFoundError``, or ``ModelUnavailableError``."""
    pool = _find_pool(name, context.table)
    return _adapter(pool, name) if name in pool.adapters and name != pool.key.model_name else _model(pool)


def health(table: WorkerTable, namespace: str | None, *, is_ready: bool) -> dict[str, Any]:
    """GET /health: each ready worker as an endpoint of ``namespace``, if given, and how many of each role."""
    now = time.monotonic()
    ready = [status.record for status in table.statuses(now) if status.state is WorkerState.READY]
    roles = {role.value: sum(record.role is role for record in ready) for role in Role if role is not Role.ROUTER}
    return {
        "status": "healthy" if is_ready else "unhealthy",
        "endpoints": [f"quartet://{namespace}/{one.role}/{one.worker_id}" for one in ready if namespace is not None],
        "roles": roles,
        "models": [
            {
                "name": pool.key.model_name,
                "encode": pool.num_ready_encode,
                "prefill": pool.num_ready_prefill,
                "decode": pool.num_ready_decode,
            }
            for pool in table.pools(now)
        ],
    }


async def tokenize_text(context: RouterContext, bodies: Bodies, body: dict[str, Any], caller: Caller) -> bytes:
    """POST /tokenize: the prompt or messages of a request for completions to token ids.

    Raises:
        InvalidRequestError: naming the field.
    """
    is_bare = "messages" not in body and body.get("add_special_tokens") is False
    if is_bare:
        del body["add_special_tokens"]  # which completions take as true only
    shows_texts = boolean(body.pop("return_token_strs", None) or False, "return_token_strs")
    steps = read_chat(body, caller) if "messages" in body else read_completion(body, caller)
    starts = (await bodies.in_turns(steps, caller.tenant)).starts
    if len(starts) != 1:
        raise InvalidRequestError("prompt: must be one", field="prompt")
    await context.intake.enter(caller.tenant, 0)
    pool = _find_pool(starts[0].model, context.table)
    text_side = await context.texts.model_text(pool.key)
    limit = max_sequence_tokens(pool)
    token_ids = await tokenize(starts[0], text_side, limit, context.tokenizing, add_special_tokens=not is_bare)
    token_text = text_side.tokenizer.token_text if shows_texts else None
    return await bodies.in_turns(tokens_json(token_ids, pool.max_model_len, token_text), caller.tenant)


async def count_tokens(context: RouterContext, bodies: Bodies, body: dict[str, Any], caller: Caller) -> dict[str, int]:
    """POST /v1/messages/count_tokens: how long the prompt of a message is.

    Raises:
        InvalidRequestError: naming the field.
    """
    asked = await bodies.in_turns(read_count(body, caller), caller.tenant)
    [start] = asked.starts
    await context.intake.enter(caller.tenant, 0)
    pool = _find_pool(start.model, context.table)
    text_side = await context.texts.model_text(pool.key)
    try:
        check_start(start)
        check_chat_of_model(start, pool, text_side)
        token_ids = await tokenize(start, text_side, max_sequence_tokens(pool), context.tokenizing)
    except InvalidRequestError as error:
        if asked.field_names is not None:
            asked.field_names.rename(error)
        raise
    return {"input_tokens": len(token_ids)}


async def detokenize(context: RouterContext, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """POST /detokenize: token ids to text. Raises ``InvalidRequestError`` naming the field."""
    found = read_fields(body, _DETOKENIZE)
    if "tokens" not in found:
        raise InvalidRequestError("tokens: is missing", field="tokens")
    token_ids: Sequence[int] = read_token_ids(found["tokens"], "tokens")
    await context.intake.enter(caller.tenant, len(token_ids))
    pool = _find_pool(found.get("model", ""), context.table)
    if len(token_ids) > (limit := max_sequence_tokens(pool)):
        raise InvalidRequestError(f"tokens: has {len(token_ids)} ids; the model takes {limit}", field="tokens")
    text_side = await context.texts.model_text(pool.key)
    check_ids(token_ids, text_side.vocab_size, "tokens")
    prompt = await context.tokenizing.run(
        caller.tenant, 4 * len(token_ids), lambda _is_wanted: text_side.tokenizer.decode(token_ids, False)
    )
    return {"prompt": prompt}


def _find_pool(name: str, table: WorkerTable) -> Pool:
    """The pool of a model, or of the model that has an adapter of this name. Raises as ``router.prepare.find_pool``."""
    pool = table.pool_of_adapter(name, time.monotonic())
    return pool or find_pool(GenerateStart(prompt=TokenPrompt(()), model=name), table)


def _adapter(pool: Pool, name: str) -> dict[str, Any]:
    return {**_model(pool), "id": name, "parent": pool.key.model_name}


def _model(pool: Pool) -> dict[str, Any]:
    return {
        "id": pool.key.model_name,
        "object": "model",
        "created": _STARTED_AT,
        "owned_by": "quartet",
        "root": pool.key.model_name,
        "parent": None,
        "max_model_len": pool.max_model_len,
    }
