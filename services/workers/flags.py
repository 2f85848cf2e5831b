"""The flags of a worker: each sets a field of its configuration, under the name that users of TensorRT-LLM know.

The file is read first, then the flags, then ``--set``: later values win.

Commands of NVIDIA Dynamo's TensorRT-LLM worker can be pasted: flags of its that have nothing to set here are known, too
(``PASTED``). They are taken where nothing is lost by it, and else refused with what to use instead.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from quartet.config import Value, load_yaml, override, with_value
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryKind
from quartet.engine.settings import Backend, Connector, EngineKind, Modality
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
        value: what the flag means, if it is given without a value.
    """

    names: tuple[str, ...]
    field: str
    form: Form
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    value: str | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.names[0]


@dataclass(frozen=True)
class Pasted:
    """A flag of Dynamo's worker that sets nothing here, but for ``values``.

    Attributes:
        names: its spellings, or flags of one purpose; messages use the one that was given.
        help: what does here what the flag does there.
        allowed: the values with which nothing is lost; empty: any; ``None``: no value, the flag is refused.
        instead: what to use in place of other values.
        field: dotted path in ``WorkerConfig`` that a value of ``values`` sets; empty: none does.
        values: such values.
    """

    names: tuple[str, ...]
    help: str
    allowed: tuple[str, ...] | None = None
    instead: str = ""
    field: str = ""
    values: tuple[str, ...] = ()


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
        ("--mm-processor-kwargs",),
        "engine.mm_processor_kwargs",
        Form.JSON,
        "settings of the picture processor in place of the model's, the same on all workers",
        "JSON",
    ),
    Flag(
        ("--enable-multimodal",),
        "engine.modality",
        Form.TEXT,
        "the same as --modality multimodal",
        value=Modality.MULTIMODAL.value,
    ),
    Flag(
        ("--publish-events-and-metrics", "--publish-kv-events"),
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
    Flag(
        ("--guided-decoding-backend",),
        "engine.override_engine_args.guided_decoding_backend",
        Form.TEXT,
        "what guides decoding in TensorRT-LLM",
        choices=("xgrammar", "llguidance"),
    ),
    Flag(("--namespace",), "server.namespace", Form.TEXT, "the deployment, also in discovery", "NAME"),
)

#: By role, the values of ``--disaggregation-mode`` that mean it.
MODES = {
    Role.ENCODE: ("encode",),
    Role.PREFILL: ("prefill",),
    # Routers decide for each request whether a Decode worker computes its prompt.
    Role.DECODE: ("decode", "agg", "pd", "prefill_and_decode"),
}

#: Checked by ``MODES``, not by a list of its own.
MODE = Pasted(("--disaggregation-mode",), "the program is the role: services.encode, .prefill, .decode", ())

#: Every flag that sets nothing.
PASTED = (
    MODE,
    Pasted(
        ("--disaggregation-strategy",),
        "routers call Prefill, then Decode",
        ("prefill_first", "decode_first"),
        "leave it out",
    ),
    Pasted(("--encode-endpoint", "--next-endpoint"), "routers find workers by discovery and choose among them", ()),
    Pasted(
        ("--endpoint-types", "--dyn-endpoint-types"),
        "routers offer chats and completions of every model",
        ("chat,completions", "completions,chat", "chat", "completions"),
        "a worker that no router is to find needs a --namespace of its own",
    ),
    Pasted(
        ("--discovery-backend", "--store-kv"),
        "the default; discovery.etcd has its settings",
        ("etcd",),
        "--set discovery.kind=file --set discovery.file.directory=DIR shares a directory",
    ),
    Pasted(
        ("--request-plane", "--response-plane"), "gRPC over TCP", ("tcp",), "requests go by gRPC over TCP; leave it out"
    ),
    Pasted(("--event-plane",), "events go by ZMQ", ("zmq",), "events go by ZMQ; leave it out"),
    Pasted(
        ("--connector",),
        "blocks go from Prefill to Decode by the engine's own ways: transfer.ways, cache_transceiver_config",
        ("none", "null", "nixl"),
        "name it to TensorRT-LLM: --override-engine-args '{\"kv_connector_config\": {...}}'",
        field="engine.connector",
        values=tuple(Connector),
    ),
    Pasted(
        ("--load-format",),
        "the default",
        ("auto",),
        'of trtllm: --override-engine-args \'{"load_format": "DUMMY"}\'; of torch: --set engine.load_format=random',
    ),
    Pasted(
        ("--use-nixl-connect",),
        "embeddings of media go by transfer.ways, or by CUDA IPC where TensorRT-LLM encodes",
        ("false",),
        "leave it out: embeddings of media go by transfer.ways, or by CUDA IPC where TensorRT-LLM encodes",
    ),
    Pasted(("--endpoint",), "give --namespace; the program is the component"),
    Pasted(("--frontend-decoding",), "leave it out: routers check files, workers decode them"),
    Pasted(("--migration-limit",), "it is the router's: attempts.max_attempts"),
    Pasted(("--disable-request-abort",), "leave it out: a request that is cancelled ends in the engine, too"),
    Pasted(("--engine-request-limit",), "requests wait in the router: admission; --max-batch-size bounds the engine's"),
    Pasted(
        ("--conversation-affinity", "--conversation-affinity-dp-rank-source"),
        "it is the router's: policy.session_affinity: true",
    ),
    Pasted(("--health-check-payload",), "workers ask their engine by themselves; stall_timeout_s says how soon"),
    Pasted(("--revision",), "--model ORG/NAME@REVISION names it"),
    Pasted(("--dump-config-to",), "quartet up FILE --dry-run shows every setting"),
    Pasted(("--model-loader-extra-config",), "leave it out: every worker loads its own weights"),
    Pasted(
        ("--multimodal-embedding-cache-capacity-gb", "--multimodal-embedding-cache-publisher"),
        "workers always keep embeddings and announce them: engine.num_embedding_blocks says how many",
    ),
    Pasted(
        (
            "--dyn-enable-structural-tag",
            "--dyn-structural-tag",
            "--dyn-structural-tag-scope",
            "--dyn-structural-tag-schema",
        ),
        "requests say it: tool_choice, or strict in a tool",
    ),
    Pasted(
        ("--dyn-default-thinking-mode", "--exclude-tools-when-tool-choice-none"),
        "requests say it, or a template by --custom-jinja-template",
    ),
    Pasted(
        (
            *("--tcp-tls-cert-path", "--tcp-tls-key-path", "--tcp-tls-ca-cert-path", "--tcp-tls-insecure"),
            *("--tcp-tls-server-name", "--tcp-tls-handshake-timeout", "--tcp-tls-client-cert-path"),
            *("--tcp-tls-client-key-path", "--tcp-tls-client-ca-cert-path"),
        ),
        "server.tls has certificates and keys",
    ),
    Pasted(
        ("--nats-tls-ca-cert-path", "--nats-tls-insecure", "--nats-tls-client-cert-path", "--nats-tls-client-key-path"),
        "there is no NATS here: server.tls and events_key_file encrypt what goes between processes",
    ),
    Pasted(
        (
            *("--torch-dtype", "--quant-algo", "--quant-dynamic", "--enable-teacache"),
            *("--teacache-use-ret-steps", "--teacache-thresh", "--disable-torch-compile", "--torch-compile-mode"),
            *("--enable-fullgraph", "--enable-cuda-graph", "--attn-backend", "--attn-type", "--linear-type"),
            *("--dit-dp-size", "--dit-tp-size", "--dit-ulysses-size", "--dit-ring-size", "--dit-cfg-size"),
            *("--dit-fsdp-size", "--enable-async-cpu-offload", "--visual-gen-block-cpu-offload-stride"),
            *("--enable-layerwise-nvtx-marker", "--skip-warmup", "--output-dir", "--default-height", "--default-width"),
            *("--default-num-frames", "--default-num-images-per-prompt", "--default-num-inference-steps"),
            *("--default-guidance-scale", "--output-modalities", "--media-output-fs-url", "--media-output-http-url"),
        ),
        "it is of workers that make pictures and videos, which there are none of here",
    ),
)


class CommandLine:
    """The parsed command line of one worker."""

    def __init__(self, role: Role, arguments: Sequence[str]) -> None:
        """Parse ``arguments``; ``--help`` and unknown flags end the process, as argparse does."""
        self._role = role
        parser = _parser(role)
        self._given, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(_unrecognized(unknown))

    def settings(self) -> dict[str, Value]:
        """The settings to build the configuration from.

        Raises:
            ConfigError: a file or value can't be read (names the flag and its field), a flag has no meaning here
                (names what to use instead), or no model is named.
        """
        for name, pasted, value in self._pasted():
            _check_pasted(name, pasted, value, self._role)
        file: Path | None = self._given.config
        settings = {} if file is None else load_yaml(file)
        for flag, given in self._flags().items():
            settings = with_value(settings, flag.field, _value(flag, given))
            if flag.name == "--namespace":
                settings = with_value(settings, f"discovery.{_discovery_kind(settings)}.namespace", given)
        for _, pasted, value in self._pasted():
            if value in pasted.values:
                settings = with_value(settings, pasted.field, value)
        for assignment in self._given.set:
            settings = override(settings, assignment)
        if "model_path" not in settings:
            raise ConfigError("model_path: is missing; give --model, or a --config file that has it")
        return settings

    def notes(self) -> list[str]:
        """A line for each flag that was given and sets nothing."""
        return [
            f"{name}: sets nothing here: {flag.help}"
            for name, flag, value in self._pasted()
            if value not in flag.values
        ]

    def named(self, message: str) -> str:
        """``message``, which begins with a field's name, preceded by the flag that set this field."""
        given = [(flag.name, flag.field) for flag in self._flags()]
        given += [(name, flag.field) for name, flag, value in self._pasted() if value in flag.values]
        for flag_name, path in given:
            # Errors from outside the configuration give the field's last name only.
            section, _, name = path.rpartition(".")
            fields = [(path, ""), (name, f"{section}." if section else "")]
            # A flag may set one value of a mapping, which is refused as a whole.
            fields += [(section, "")] if "." in section else []
            for field, where in fields:
                if message.startswith((f"{field}:", f"{field}.", f"{field}[")):
                    return f"{flag_name}: {where}{message}"
        return message

    def _flags(self) -> dict[Flag, object]:
        """The flags that were given, with their values."""
        values = {flag: getattr(self._given, flag.name) for flag in FLAGS}
        return {flag: value for flag, value in values.items() if value is not None}

    def _pasted(self) -> list[tuple[str, Pasted, str]]:
        """The flags that were given and set nothing: name, flag, value."""
        given = ((name, flag, getattr(self._given, name)) for flag in PASTED for name in flag.names)
        return [(name, flag, value) for name, flag, value in given if value is not None]


def _unrecognized(unknown: Sequence[str]) -> str:
    """What to say of arguments that no flag takes, with the flag that each may have meant."""
    names = [name for flag in (*FLAGS, *PASTED) for name in flag.names]
    names += ["--config", "--set"]
    given = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    near = {name: difflib.get_close_matches(name, names, n=1) for name in given}
    hints = [f"{name}: did you mean {found[0]}?" for name, found in near.items() if found]
    return "; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints, "docs/workers.md has all flags"])


def _parser(role: Role) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{role}",
        description=f"Serve the {role} phase. Flags are fields of the configuration; what is later wins: file, flags, "
        "--set.",
        # A prefix of one flag becomes ambiguous when a second flag with it is added.
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the worker's YAML file")
    for flag in FLAGS:
        described = f"{flag.help} (field {flag.field})".replace("%", "%%")
        if flag.form is Form.SWITCH:
            action = argparse.BooleanOptionalAction
            parser.add_argument(*flag.names, dest=flag.name, action=action, default=None, help=described)
        elif flag.value is not None:
            parser.add_argument(*flag.names, dest=flag.name, action="store_const", const=flag.value, help=described)
        else:
            metavar = flag.metavar or "|".join(flag.choices)
            parser.add_argument(*flag.names, dest=flag.name, metavar=metavar, help=described)
    _add_pasted(parser)
    parser.add_argument("--set", action="append", default=[], metavar="NAME.NAME=VALUE", help="change any one field")
    return parser


def _add_pasted(parser: argparse.ArgumentParser) -> None:
    taken = parser.add_argument_group("flags of NVIDIA Dynamo's worker that are taken and set nothing")
    setting = parser.add_argument_group("flags of it that some values set a field by, and others nothing")
    for flag in PASTED:
        for name in flag.names:
            if flag.allowed is None:
                # Some have a value, others are switches.
                parser.add_argument(name, dest=name, nargs="*", help=argparse.SUPPRESS)
            else:
                metavar = "|".join((*flag.allowed, *flag.values)) or "VALUE"
                group = setting if flag.values else taken
                sets = f"; {' and '.join(flag.values)} set field {flag.field}" if flag.values else ""
                group.add_argument(name, dest=name, metavar=metavar, help=f"{flag.help}{sets}")


def _check_pasted(name: str, flag: Pasted, value: str, role: Role) -> None:
    """Refuse a flag whose meaning would be lost. Raises ``ConfigError``."""
    if flag is MODE:
        if value not in MODES[role]:
            meant = [other for other, modes in MODES.items() if value in modes]
            start = f"start python -m services.{meant[0]}" if meant else f"must be one of {', '.join(MODES[role])}"
            raise ConfigError(f"{name}: {value!r} is not what a worker of role {role} does: {start}")
    elif flag.allowed is None:
        raise ConfigError(f"{name}: is refused: {flag.help}")
    elif flag.allowed and value not in (*flag.allowed, *flag.values):
        known = ", ".join((*flag.allowed, *flag.values))
        raise ConfigError(f"{name}: must be one of {known}, not {value!r}: {flag.instead}")


def _discovery_kind(settings: dict[str, Value]) -> str:
    discovery = settings.get("discovery")
    return str(discovery.get("kind", DiscoveryKind.ETCD)) if isinstance(discovery, dict) else DiscoveryKind.ETCD.value


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
