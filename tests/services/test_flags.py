"""Every flag of a worker's command line reaches the field that it is for, in every role."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import Backend, Connector, EngineKind, Modality
from quartet.errors import ConfigError, DiscoveryError, InvalidRequestError, ServingError, WorkerReplacedError
from services.workers import process as command
from services.workers.config import WorkerConfig
from services.workers.flags import FLAGS, MODE, MODES, PASTED, CommandLine, Pasted

ROLES = (Role.ENCODE, Role.PREFILL, Role.DECODE)
TRTLLM = ["--engine", "trtllm"]
#: What to give, and what its field is to be.
GIVEN: dict[str, tuple[list[str], object]] = {
    "--model": (["--model", "a/folder"], "a/folder"),
    "--served-model-name": (["--served-model-name", "5"], "5"),
    "--engine": (["--engine", "mock"], EngineKind.MOCK),
    "--tensor-parallel-size": ([*TRTLLM, "--tensor-parallel-size", "2"], 2),
    "--pipeline-parallel-size": ([*TRTLLM, "--pipeline-parallel-size", "3"], 3),
    "--expert-parallel-size": ([*TRTLLM, "--expert-parallel-size", "4"], 4),
    "--enable-attention-dp": ([*TRTLLM, "--enable-attention-dp"], True),
    "--kv-block-size": (["--kv-block-size", "64"], 64),
    "--free-gpu-memory-fraction": ([*TRTLLM, "--free-gpu-memory-fraction", "0.85"], 0.85),
    "--max-batch-size": (["--max-batch-size", "16"], 16),
    "--max-num-tokens": (["--max-num-tokens", "4096"], 4096),
    "--max-seq-len": (["--max-seq-len", "1024"], 1024),
    "--extra-engine-args": ([*TRTLLM, "--extra-engine-args", "engine.yaml"], Path("engine.yaml")),
    "--override-engine-args": (
        [*TRTLLM, "--override-engine-args", '{"kv_cache_config": {"dtype": "fp8"}}'],
        {"kv_cache_config": {"dtype": "fp8"}},
    ),
    "--backend": ([*TRTLLM, "--backend", "_autodeploy"], Backend.AUTODEPLOY),
    "--gpus-per-node": ([*TRTLLM, "--gpus-per-node", "8"], 8),
    "--modality": (["--modality", "text"], Modality.TEXT),
    "--mm-processor-kwargs": (["--mm-processor-kwargs", '{"do_pad": true}'], {"do_pad": True}),
    "--enable-multimodal": (["--enable-multimodal"], Modality.MULTIMODAL),
    "--publish-events-and-metrics": ([*TRTLLM, "--no-publish-kv-events"], False),
    "--custom-jinja-template": (["--custom-jinja-template", "chat.jinja"], Path("chat.jinja")),
    "--reasoning-parser": (["--dyn-reasoning-parser", "gpt_oss"], "gpt_oss"),
    "--tool-call-parser": (["--dyn-tool-call-parser", "harmony"], "harmony"),
    "--max-file-size-mb": (["--max-file-size-mb", "0.5"], 0.5),
    "--guided-decoding-backend": ([*TRTLLM, "--guided-decoding-backend", "xgrammar"], "xgrammar"),
    "--namespace": (["--namespace", "mine"], "mine"),
}
REFUSED = {
    "--allowed-local-media-path": ["--allowed-local-media-path", "/media"],
    "--max-beam-width": [*TRTLLM, "--max-beam-width", "2"],
}


class Ended(Exception):
    """A worker's process would have ended."""


class Recorder:
    """Stands where a worker's process would run, and keeps its configuration."""

    configs: list[tuple[Role, WorkerConfig]]

    def __init__(self, config: WorkerConfig, role: Role, _engine_factory: object, **callbacks: object) -> None:
        assert all(map(callable, callbacks.values()))
        Recorder.configs.append((role, config))

    async def run(self, _stop: object) -> None:
        return


@pytest.fixture
def run_role(monkeypatch: pytest.MonkeyPatch) -> Callable[[Role, list[str]], WorkerConfig]:
    """Run ``python -m services.ROLE`` with flags, up to where a worker would be made."""

    def leave(_code: int) -> None:
        raise Ended

    monkeypatch.setattr(command, "WorkerProcess", Recorder)
    monkeypatch.setattr(command, "configure", lambda _config: None)
    monkeypatch.setattr(command, "_leave", leave)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _seconds: None)

    def run(role: Role, flags: list[str]) -> WorkerConfig:
        Recorder.configs = []
        monkeypatch.setattr(sys, "argv", [f"services.{role}", *flags])
        with pytest.raises(Ended):
            runpy.run_module(f"services.{role}", run_name="__main__")
        [(ran, config)] = Recorder.configs
        assert ran is role
        return config

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [(WorkerReplacedError("its id is taken"), 3), (DiscoveryError("no etcd answers"), 1), (ConfigError("no port"), 1)],
)
def test_the_exit_code_tells_a_worker_whose_id_is_taken_from_one_that_failed(
    error: Exception, code: int, run_role: Callable[[Role, list[str]], WorkerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    async def fail(_recorder: Recorder, _stop: object) -> None:
        raise error

    def leave(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(Recorder, "run", fail)
    monkeypatch.setattr(command, "_leave", leave)
    run_role(Role.DECODE, ["--model-path", "somewhere"])
    assert codes == [code]


def read(flags: list[str]) -> WorkerConfig:
    """The configuration that ``flags`` make."""
    return build(WorkerConfig, CommandLine(Role.DECODE, flags).settings())


def refusal(flags: list[str], role: Role = Role.DECODE) -> str:
    """What is said to ``flags``, as the process says it."""
    line = CommandLine(role, flags)
    with pytest.raises(ConfigError) as caught:
        build(WorkerConfig, line.settings())
    return line.named(str(caught.value))


def field_of(config: object, path: str) -> object:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name)
    return config


def test_no_flag_is_left_out_here() -> None:
    assert {flag.name for flag in FLAGS} == {*GIVEN, *REFUSED}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.name in GIVEN], ids=lambda flag: flag.name)
def test_every_flag_reaches_its_field_in_every_role(
    flag: object, role: Role, run_role: Callable[[Role, list[str]], WorkerConfig]
) -> None:
    [(name, field)] = [(known.name, known.field) for known in FLAGS if known is flag]
    given, expected = GIVEN[name]
    unset = WorkerConfig(model_path="model")
    assert field_of(unset, field) != expected, "so that it shows"
    flags = given if name == "--model" else ["--model", "model", *given]
    assert field_of(run_role(role, flags), field) == expected


def test_the_model_has_a_second_name() -> None:
    assert read(["--model-path", "folder"]).model_path == "folder"


def test_help_names_every_flag_and_its_field() -> None:
    command = [sys.executable, "-m", "services.decode", "--help"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=True, env={**os.environ, "COLUMNS": "200"}
    )
    for flag in FLAGS:
        assert all(name in ended.stdout for name in flag.names)
        assert f"(field {flag.field})" in ended.stdout
    for name in ("--config", "--set", "--no-publish-events-and-metrics"):
        assert name in ended.stdout
    words = " ".join(ended.stdout.split())
    for pasted in PASTED:
        if pasted.allowed is not None:
            assert all(name in words for name in pasted.names)
            assert pasted.help in words
    _, _, pasted_words = words.partition("that are taken and set nothing")
    setting_nothing, _, setting_a_field = pasted_words.partition("that some values set a field by")
    assert "--connector" not in setting_nothing
    assert "; kvbm and lmcache set field engine.connector" in setting_a_field


def test_the_table_of_the_documentation_has_them_all() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "workers.md").read_text(encoding="utf-8")
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        assert f"| {names} | `{flag.field}` |" in documented
    for pasted in PASTED:
        row = next(line for line in documented.splitlines() if f"`{pasted.names[0]}`" in line)
        assert all(f"`{name}`" in row for name in pasted.names)
        assert ("| refused |" in row) is (pasted.allowed is None)


#: Published commands without their program: of a Prefill worker of gpt-oss, and of a worker with Encode beside it.
PUBLISHED = {
    Role.PREFILL: (
        "--model-path /model --served-model-name openai/gpt-oss-120b --extra-engine-args e.yaml "
        "--disaggregation-mode prefill --disaggregation-strategy prefill_first "
        "--dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony "
        "--max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9 --tensor-parallel-size 4 "
        "--expert-parallel-size 4"
    ),
    Role.DECODE: (
        "--model-path /model --served-model-name llava --extra-engine-args e.yaml --modality multimodal "
        "--custom-jinja-template t.jinja --encode-endpoint dyn://dynamo.tensorrt_llm_encode.generate "
        "--disaggregation-mode prefill_and_decode --publish-events-and-metrics --connector none --request-plane tcp"
    ),
}


@pytest.mark.parametrize("role", PUBLISHED)
def test_published_commands_can_be_pasted(
    role: Role, run_role: Callable[[Role, list[str]], WorkerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        config = run_role(role, [*TRTLLM, *PUBLISHED[role].split()])
    assert (config.model_path, config.engine.extra_engine_args) == ("/model", Path("e.yaml"))
    known = {name: flag for flag in PASTED for name in flag.names}
    said = [
        f"{role}: {name}: sets nothing here: {known[name].help}" for name in known if name in PUBLISHED[role].split()
    ]
    assert said and caplog.messages == said


@pytest.mark.parametrize("role", ROLES)
def test_a_mode_is_that_of_the_program_or_says_which_one_to_start(role: Role) -> None:
    for other, modes in MODES.items():
        for mode in modes:
            flags = ["--model", "m", "--disaggregation-mode", mode]
            if other is role:
                assert CommandLine(role, flags).settings() == {"model_path": "m"}
            else:
                assert refusal(flags, role).endswith(f"start python -m services.{other}")


@pytest.mark.parametrize("pasted", [flag for flag in PASTED if flag is not MODE], ids=lambda flag: flag.names[0])
def test_a_flag_that_sets_nothing_is_taken_or_says_what_to_use_instead(pasted: Pasted) -> None:
    for name in pasted.names:
        for value in pasted.allowed or ("dyn://a.b.c",) * (pasted.allowed is not None):
            assert CommandLine(Role.DECODE, ["--model", "m", name, value]).settings() == {"model_path": "m"}
        if pasted.allowed is None:
            # As a switch and with a value.
            for value in ([], ["1"]):
                assert refusal(["--model", "m", name, *value]) == f"{name}: is refused: {pasted.help}"
        elif pasted.allowed:
            said = refusal(["--model", "m", name, "other"])
            assert said.startswith(f"{name}: must be one of ") and said.endswith(f", not 'other': {pasted.instead}")


@pytest.mark.parametrize("connector", Connector)
def test_a_pasted_flag_with_a_value_that_has_a_field_sets_it(connector: Connector) -> None:
    line = CommandLine(Role.DECODE, [*TRTLLM, "--model", "m", "--connector", connector])
    assert read([*TRTLLM, "--model", "m", "--connector", connector]).engine.connector is connector
    assert line.notes() == []
    assert line.named("engine.connector: is wrong") == "--connector: engine.connector: is wrong"
    assert refusal(["--model", "m", "--connector", connector]).startswith("--connector: engine.connector: the engine")


def test_the_namespace_is_also_that_of_discovery(tmp_path: Path) -> None:
    assert read(["--model", "m", "--namespace", "mine"]).discovery.etcd.namespace == "mine"
    file = tmp_path / "worker.yaml"
    file.write_text("model_path: m\ndiscovery: {kind: file, file: {directory: /shared, namespace: other}}\n")
    config = read(["--config", str(file), "--namespace", "mine"])
    assert config.discovery.file is not None
    assert (config.server.namespace, config.discovery.file.namespace) == ("mine", "mine")


def test_the_later_one_wins_of_file_flags_and_assignments(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model_path: of-file\nengine: {kind: mock, block_size: 1, max_model_len: 10, max_batch_size: 2}\n")
    flags = ["--set", "engine.block_size=3", "--config", str(file), "--kv-block-size", "2", "--max-seq-len", "20"]
    config = read(flags)
    assert (config.model_path, config.engine.kind) == ("of-file", EngineKind.MOCK)
    assert (config.engine.max_batch_size, config.engine.max_model_len, config.engine.block_size) == (2, 20, 3)


def test_a_file_s_switch_can_be_turned_back(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model_path: m\nengine: {kind: trtllm, enable_attention_dp: true}\n")
    assert read(["--config", str(file)]).engine.enable_attention_dp
    assert not read(["--config", str(file), "--no-enable-attention-dp"]).engine.enable_attention_dp


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-batch-size", "many"], "--max-batch-size: engine.max_batch_size: must be a whole number, not 'many'"),
        (["--max-batch-size", "0"], "--max-batch-size: engine.max_batch_size: must be at least 1, not 0"),
        (["--max-file-size-mb", "x"], "--max-file-size-mb: max_file_size_mb: must be a number, not 'x'"),
        (["--max-file-size-mb", "nan"], "--max-file-size-mb: max_file_size_mb: must be a number"),
        (["--modality", "smell"], "--modality: engine.modality: must be one of text, multimodal, not 'smell'"),
        (["--engine", "vllm"], "--engine: engine.kind: must be one of torch, mock, trtllm"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: engine.tensor_parallel_size: the engine torch does"),
        ([*TRTLLM, "--override-engine-args", "[1]"], "--override-engine-args: engine.override_engine_args: must be a"),
        ([*TRTLLM, "--override-engine-args", "{"], "--override-engine-args: engine.override_engine_args: must be a"),
        (
            ["--guided-decoding-backend", "xgrammar"],
            "--guided-decoding-backend: engine.override_engine_args: the engine",
        ),
        (REFUSED["--max-beam-width"], "--max-beam-width: engine.max_beam_width: must be 1, not 2"),
        (REFUSED["--allowed-local-media-path"], "--allowed-local-media-path: allowed_local_media_path: workers follow"),
    ],
)
def test_an_error_names_its_flag_and_its_field(flags: list[str], message: str) -> None:
    assert refusal(["--model", "m", *flags]).startswith(message)


def test_the_refused_path_says_where_it_belongs() -> None:
    said = refusal(["--model", "m", *REFUSED["--allowed-local-media-path"]])
    assert "router" in said and "media.allowed_local_paths" in said


def test_a_worker_without_a_model_says_how_to_name_one() -> None:
    assert refusal([]) == "model_path: is missing; give --model, or a --config file that has it"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("max_model_len: too many"), "--max-seq-len: engine.max_model_len: too many"),
        (InvalidRequestError("too many", field="max_model_len"), "--max-seq-len: engine.max_model_len: too many"),
        (ConfigError("model_path: not here"), "--model: model_path: not here"),
        (ConfigError("engine.num_blocks: too many"), "engine.num_blocks: too many"),
    ],
)
def test_an_error_found_later_names_the_flag_that_set_the_value(error: ConfigError | ServingError, said: str) -> None:
    line = CommandLine(Role.DECODE, ["--model", "m", "--max-seq-len", "9"])
    assert line.named(command._with_field(error)) == said


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max-seq", "--max-seq-len"),
        ("--tensor-paralel-size=2", "--tensor-parallel-size"),
        ("--migration-limits", "--migration-limit"),
        ("--sett", "--set"),
        ("--nothing-like-it", ""),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_and_the_page_of_all(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        CommandLine(Role.DECODE, ["--model", "m", given, "9"])
    said = capsys.readouterr().err
    hint = f"; {given.partition('=')[0]}: did you mean {meant}?" if meant else ""
    assert (
        ended.value.code,
        said.endswith(f"unrecognized arguments: {given} 9{hint}; docs/workers.md has all flags\n"),
    ) == (
        2,
        True,
    ), said
