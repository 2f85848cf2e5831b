"""What a worker's part in serving asks of TensorRT-LLM's arguments: set where nobody said, refused where it differs."""

from __future__ import annotations

from quartet.engine.trtllm import api
from quartet.engine.trtllm.layers import KV_CACHE, Arguments
from quartet.errors import ConfigError

_TRANSCEIVER = "cache_transceiver_config"
_DEFAULT_TRANSCEIVER = "NIXL"
#: Of a hand-off that nobody fetches: its blocks are prefill's until then. TensorRT-LLM counts from the prompt's end and
#: nothing renews it, unlike our lease of 30 s, which decode renews while the request waits there: so it has to be
#: longer than that, with time for a decode that is queued. One that waits still longer finds nothing to pull, fails and
#: is prefilled again; so that blocks which nobody will pull are prefill's for a minute at most.
_DEFAULT_TRANSFER_TIMEOUT_MS = 60_000
#: Events between two polls; those beyond are lost.
_DEFAULT_EVENT_BUFFER_SIZE = 16_384
_ENCODER_DTYPES = ("auto", "float16", "float32", "bfloat16")


def keep_safe_for_autodeploy(arguments: Arguments) -> None:
    """Drop what not every AutoDeploy takes, with a warning for each."""
    for origin in arguments.keep_only(api.AUTODEPLOY.types):
        hint = "; its one knob for GPUs is world_size" if origin.endswith("parallel_size") else ""
        arguments.warnings.append(f"{origin}: left out, the backend _autodeploy may not take it{hint}")


def keep_fit_for_encoder(arguments: Arguments) -> None:
    """Drop what the vision part alone has no use for, with one warning: files of engines are made for both."""
    if dropped := arguments.keep_only(api.ENCODER):
        arguments.warnings.append(f"{', '.join(dropped)}: left out, an encode worker has no use for it")
    if "dtype" in arguments.values and arguments.values["dtype"] not in _ENCODER_DTYPES:
        raise ConfigError(f"{arguments.origin('dtype')}: must be one of {', '.join(_ENCODER_DTYPES)}")


def refuse_encoder_alone(arguments: Arguments) -> None:
    """A worker that generates loads all of the model.

    Raises:
        ConfigError: it is told to load the vision part only.
    """
    if arguments.values.get("mm_encoder_only"):
        raise ConfigError(f"{arguments.origin('mm_encoder_only')}: for encode workers only")


def prepare_prefill(arguments: Arguments) -> float:
    """What a worker needs that hands its blocks on; for how many seconds it keeps them.

    Raises:
        ConfigError: somebody said what makes that impossible.
    """
    if not arguments.values.get("disable_overlap_scheduler", True):
        raise ConfigError(
            f"{arguments.origin('disable_overlap_scheduler')}: must be true on a prefill worker: it hands "
            "nothing on with the overlap scheduler"
        )
    arguments.set_default("disable_overlap_scheduler", True)
    timeout_s = _prepare_transceiver(arguments)
    if timeout_s is None:
        raise ConfigError(f"{arguments.origin(_TRANSCEIVER)}: a prefill worker cannot do without its backend")
    _warn_of_small_buffer(arguments)
    return timeout_s


def prepare_decode(arguments: Arguments) -> float | None:
    """What a worker needs that takes hand-offs; their timeout in seconds, or ``None``: it was told to take none.

    Raises:
        ConfigError: somebody said what makes that impossible.
    """
    return _prepare_transceiver(arguments)


def _prepare_transceiver(arguments: Arguments) -> float | None:
    if _TRANSCEIVER in arguments.values and arguments.values[_TRANSCEIVER] is None:
        return None
    given = arguments.section(_TRANSCEIVER)
    config = {"backend": _DEFAULT_TRANSCEIVER, **given}
    if config["backend"] is None:
        return None
    if (arguments.values.get("max_beam_width") or 1) != 1:
        raise ConfigError(
            f"{arguments.origin('max_beam_width')}: must be 1 where requests are handed over; "
            f"{_TRANSCEIVER}: null makes a decode worker that takes no hand-offs"
        )
    timeout_ms = config.get("kv_transfer_timeout_ms")
    if not isinstance(timeout_ms, int):
        timeout_ms = config["kv_transfer_timeout_ms"] = _DEFAULT_TRANSFER_TIMEOUT_MS
    arguments.values[_TRANSCEIVER] = config
    return timeout_ms / 1000


def _warn_of_small_buffer(arguments: Arguments) -> None:
    num_tokens = arguments.section(_TRANSCEIVER).get("max_tokens_in_buffer")
    longest = arguments.values.get("max_seq_len")
    if isinstance(num_tokens, int) and isinstance(longest, int) and num_tokens < longest:
        arguments.warnings.append(
            f"{arguments.origin(_TRANSCEIVER)}.max_tokens_in_buffer: longer prompts, up to max_seq_len, "
            "may fail to be handed on"
        )


def publish_events(arguments: Arguments) -> bool:
    """Have the cache tell what it holds; whether it does.

    Raises:
        ConfigError: its buffer of events is switched off while they are wanted.
    """
    cache = arguments.section(KV_CACHE)
    if cache.get("enable_block_reuse", True) is False:
        origin = arguments.origin(f"{KV_CACHE}.enable_block_reuse")
        arguments.warnings.append(f"{origin}: is off, so requests are placed without knowing the cache")
        return False
    path = f"{KV_CACHE}.event_buffer_max_size"
    size = cache.get("event_buffer_max_size", _DEFAULT_EVENT_BUFFER_SIZE)
    if not isinstance(size, int) or size <= 0:
        raise ConfigError(
            f"{arguments.origin(path)}: must be more than 0 with publish_events_and_metrics, which may be switched off"
        )
    arguments.set_default(path, size)
    return True


def publish_metrics(arguments: Arguments, name: str) -> bool:
    """Have the engine measure what ``name`` switches on; whether it does: somebody may have switched it off."""
    arguments.set_default(name, True)
    if not arguments.values[name]:
        arguments.warnings.append(f"{arguments.origin(name)}: is off, so some metrics will be missing")
        return False
    return True
