"""The flags of a worker: each sets a field of its configuration, under the name that users of TensorRT-LLM know.

The file is read first, then the flags, then ``--set``: later values win.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from quartet.config import Value, load_yaml, override, with_value
from quartet.engine.settings import Backend, EngineKind, Modality
from quartet.errors import ConfigError


class Form(Enum):
    """How a flag's text becomes a value."""

    TEXT = "text"
    COUNT = "a whole number"
    NUMBER = "a number"
    JSON = "a JSON object"
    SWITCH = "given or not, --no-... for the contrary"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        names: its spellings; messages use the first one.
        field: dotted path in ``WorkerConfig``.
        form: of its value.
        help: its line in ``--help``.
        metavar: name of the value in ``--help``.
        choices: the allowed values; empty: any.
    """

    names: tuple[str, ...]
    field: str
    form: Form
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.names[0]


#: Every flag that sets one field.
FLAGS = (
    Flag(
        ("--model", "--model-path"),
        "model_path",
        Form.TEXT,
        "folder of a Hugging Face checkpoint, or ORG/NAME",
        "MODEL",
    ),
    Flag(("--served-model-name",), "model_name", Form.TEXT, "what requests call the model by", "NAME"),
    Flag(("--engine",), "engine.kind", Form.TEXT, "which engine computes", choices=tuple(EngineKind)),
    Flag(("--tensor-parallel-size",), "engine.tensor_parallel_size", Form.COUNT, "GPUs that share each layer", "N"),
    Flag(
        ("--pipeline-parallel-size",),
        "engine.pipeline_parallel_size",
        Form.COUNT,
        "groups of GPUs that share the layers",
        "N",
    ),
    Flag(("--expert-parallel-size",), "engine.expert_parallel_size", Form.COUNT, "GPUs that share the experts", "N"),
    Flag(
        ("--enable-attention-dp",),
        "engine.enable_attention_dp",
        Form.SWITCH,
        "every GPU attends to requests of its own",
    ),
    Flag(("--kv-block-size",), "engine.block_size", Form.COUNT, "tokens of a KV block", "TOKENS"),
    Flag(
        ("--free-gpu-memory-fraction",),
        "engine.free_gpu_memory_fraction",
        Form.NUMBER,
        "share of the GPU's free memory that the KV pool takes",
        "SHARE",
    ),
    Flag(("--max-batch-size",), "engine.max_batch_size", Form.COUNT, "requests that compute at the same time", "N"),
    Flag(("--max-num-tokens",), "engine.max_num_tokens", Form.COUNT, "tokens that one step computes", "TOKENS"),
    Flag(("--max-seq-len",), "engine.max_model_len", Form.COUNT, "tokens of prompt and output together", "TOKENS"),
    Flag(
        ("--max-beam-width",),
        "engine.max_beam_width",
        Form.COUNT,
        "refused above 1: no request can ask for beams",
        "N",
    ),
    Flag(
        ("--extra-engine-args",),
        "engine.extra_engine_args",
        Form.TEXT,
        "YAML file with arguments of tensorrt_llm.LLM",
        "FILE",
    ),
    Flag(
        ("--override-engine-args",),
        "engine.override_engine_args",
        Form.JSON,
        "the same as a JSON object, over the file",
        "JSON",
    ),
    Flag(("--backend",), "engine.backend", Form.TEXT, "what runs the model in TensorRT-LLM", choices=tuple(Backend)),
    Flag(("--gpus-per-node",), "engine.gpus_per_node", Form.COUNT, "GPUs of a host", "N"),
    Flag(
        ("--modality",),
        "engine.modality",
        Form.TEXT,
        "what a prefill or decode worker takes beside tokens",
        choices=tuple(Modality),
    ),
    Flag(
        ("--publish-events-and-metrics",),
        "engine.publish_events_and_metrics",
        Form.SWITCH,
        "publish what the cache holds and how long steps take",
    ),
    Flag(
        ("--custom-jinja-template",),
        "custom_jinja_template",
        Form.TEXT,
        "Jinja file that lays out chats in place of the model's own template",
        "FILE",
    ),
    Flag(
        ("--reasoning-parser", "--dyn-reasoning-parser"),
        "reasoning_parser",
        Form.TEXT,
        "how routers find the reasoning in answers to chats; none: not at all",
        "NAME",
    ),
    Flag(
        ("--tool-call-parser", "--dyn-tool-call-parser"),
        "tool_call_parser",
        Form.TEXT,
        "how they find tool calls; none: not at all",
        "NAME",
    ),
    Flag(
        ("--allowed-local-media-path",),
        "allowed_local_media_path",
        Form.TEXT,
        "refused: it is the router's, media.allowed_local_paths",
        "DIR",
    ),
    Flag(("--max-file-size-mb",), "max_file_size_mb", Form.NUMBER, "one media file, at most, in 10**6 bytes", "MB"),
)


class CommandLine:
    """The parsed command line of one worker."""

    def __init__(self, program: str, description: str, arguments: Sequence[str]) -> None:
        """Parse ``arguments``; ``--help`` and unknown flags end the process, as argparse does."""
        self._given = _parser(program, description).parse_args(arguments)

    def settings(self) -> dict[str, Value]:
        """The settings to build the configuration from.

        Raises:
            ConfigError: a file or value can't be read (names the flag and its field), or no model is named.
        """
        file: Path | None = self._given.config
        settings = {} if file is None else load_yaml(file)
        for flag, given in self._flags().items():
            settings = with_value(settings, flag.field, _value(flag, given))
        for assignment in self._given.set:
            settings = override(settings, assignment)
        if "model_path" not in settings:
            raise ConfigError("model_path: is missing; give --model, or a --config file that has it")
        return settings

    def named(self, message: str) -> str:
        """``message``, which begins with a field's name, preceded by the flag that set this field."""
        for flag in self._flags():
            # Errors from outside the configuration give the field's last name only.
            section, _, name = flag.field.rpartition(".")
            for field, where in ((flag.field, ""), (name, f"{section}." if section else "")):
                if message.startswith((f"{field}:", f"{field}.", f"{field}[")):
                    return f"{flag.name}: {where}{message}"
        return message

    def _flags(self) -> dict[Flag, object]:
        """The flags that were given, with their values."""
        values = {flag: getattr(self._given, flag.field) for flag in FLAGS}
        return {flag: value for flag, value in values.items() if value is not None}


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"{description} Flags are fields of the configuration; what is later wins: file, flags, --set.",
        # A prefix of one flag becomes ambiguous when a second flag with it is added.
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the worker's YAML file")
    for flag in FLAGS:
        described = f"{flag.help} (field {flag.field})".replace("%", "%%")
        if flag.form is Form.SWITCH:
            action = argparse.BooleanOptionalAction
            parser.add_argument(*flag.names, dest=flag.field, action=action, default=None, help=described)
        else:
            metavar = flag.metavar or "|".join(flag.choices)
            parser.add_argument(*flag.names, dest=flag.field, metavar=metavar, help=described)
    parser.add_argument("--set", action="append", default=[], metavar="NAME.NAME=VALUE", help="change any one field")
    return parser


def _value(flag: Flag, given: object) -> Value:
    """The value of ``flag`` as YAML would read it. Raises ``ConfigError``."""
    if not isinstance(given, str):
        return given
    try:
        if flag.form is Form.COUNT:
            return int(given)
        if flag.form is Form.NUMBER:
            return float(given)
        if flag.form is Form.JSON:
            return _json_object(given)
    except ValueError as error:
        # A JSON text is long; its error says where it is wrong.
        what = f": {error}" if flag.form is Form.JSON else f", not {given!r}"
        raise ConfigError(f"{flag.name}: {flag.field}: must be {flag.form.value}{what}") from error
    return given


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    return value
