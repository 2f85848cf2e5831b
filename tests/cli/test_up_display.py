"""What ``quartet up`` shows: log lines behind names, lines that can be pasted, and the plan of ``--dry-run``."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.app import app
from cli.up_display import LaunchDisplay, paste_lines
from quartet.rpc.channels import TlsConfig
from quartet.shipped import topologies
from services.topology.launch import find_grpcurl

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TEXT = """
namespace: shown
model: {path: /no/such/model, name: big}
engine: {kind: trtllm}
discovery: {etcd: {endpoints: ["127.0.0.1:1"]}}
environment: {TLLM_LOG_LEVEL: "a b", HF_TOKEN: private, aws_secret_access_key: private}
router: {port: 0, overrides: {policy: {name: round_robin}}}
workers:
  - role: prefill
    gpus: [[0, 1]]
    overrides: {engine: {extra_engine_args: no/such/file.yaml, tensor_parallel_size: 2}}
  - {role: decode, name: writer, replicas: 2, gpus: [[2], [3]], limits: {cpus: 2}}
"""
GRPCURL_FILES = {"cacert": "CA", "cert": "CERT", "key": "KEY"}
in_empty_directory = pytest.mark.usefixtures("empty_directory")


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it runs in."""
    directory = tmp_path / "empty"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def dry_run(file: Path, *options: str) -> Result:
    result = CliRunner(env={"ETCD_ENDPOINTS": "127.0.0.1:1"}).invoke(app, ["up", str(file), "--dry-run", *options])
    assert list(Path.cwd().iterdir()) == []
    assert result.exit_code == 0, result.output
    return result


def shown(file: Path, *options: str) -> str:
    """The plan, without the notes before it."""
    return dry_run(file, *options).stdout


def rows_of(text: str) -> dict[str, list[str]]:
    """The last cell's lines by process, with the other cells first."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[0]:
                name, found[cells[0]] = cells[0], cells[1:5]
            found[name].append(cells[5])
    return found


def test_log_lines_stand_whole_behind_the_name_of_their_process(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay()
    display.log_line("router", "a [bold]line[/bold] of " + "x" * 300)
    display.log_line("prefill-10", "another")
    display.progress("starting")
    assert capsys.readouterr().err.splitlines() == [
        "router    | a [bold]line[/bold] of " + "x" * 300,
        "prefill-10 | another",
        "up        | starting",
    ]
    assert display.last_progress == "starting"


def test_ready_and_what_to_paste_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    LaunchDisplay().ready("127.0.0.1:50050")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "ready"]
    assert lines[-2:] == ["quartet generate 'Once upon a time' --max-tokens 32", "quartet workers"]


def test_where_there_is_http_it_says_where_the_page_is(capsys: pytest.CaptureFixture[str]) -> None:
    LaunchDisplay().ready("127.0.0.1:50050", http_address="127.0.0.1:8000")
    assert capsys.readouterr().out.splitlines()[-1] == "# look at it: http://127.0.0.1:8000/"
    LaunchDisplay().ready("127.0.0.1:50050", http_address="127.0.0.1:8000", http_keys_file=Path("keys"))
    assert "https://127.0.0.1:8000/ (the page asks for the key in keys)" in capsys.readouterr().out


def test_another_port_is_part_of_every_line() -> None:
    *_, generate, workers = paste_lines("127.0.0.1:6001", "/usr/bin")
    assert generate.endswith("--router 127.0.0.1:6001")
    assert workers == "quartet workers --router 127.0.0.1:6001"


def test_the_path_is_exported_only_where_programs_are_not_on_it() -> None:
    grpcurl = find_grpcurl()
    on_path = ":".join(map(str, [BIN, *([grpcurl.parent] if grpcurl else [])]))
    assert not any(line.startswith("export") for line in paste_lines("127.0.0.1:50050", on_path))
    [export] = [line for line in paste_lines("127.0.0.1:50050", "/nowhere") if line.startswith("export ")]
    assert export.startswith(f"export PATH={BIN}")
    assert export.endswith(":$PATH")


@pytest.mark.grpcurl
def test_the_grpcurl_line_asks_the_router_for_tokens() -> None:
    [line] = [line for line in paste_lines("127.0.0.1:6001", "/nowhere") if line.startswith("grpcurl ")]
    _, _, _, request, address, method = shlex.split(line)
    assert request == '{"start":{"text":"Once upon a time","sampling":{"max_tokens":32}}}'
    assert (address, method) == ("127.0.0.1:6001", "quartet.v1.RouterService/Generate")


def test_lines_for_a_router_with_tls_name_the_certificate_once_for_all_of_them() -> None:
    tls = TlsConfig(ca_file=Path("/run/ca.pem"), cert_file=Path("/run/a b.pem"), key_file=Path("/run/o.key"))
    lines = paste_lines("127.0.0.1:6001", "/nowhere", tls)
    script = "\n".join([line for line in lines if line.startswith("export QUARTET")] + ["env"])
    shell = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    assert {"QUARTET_TLS_CA=/run/ca.pem", "QUARTET_TLS_CERT=/run/a b.pem", "QUARTET_TLS_KEY=/run/o.key"} <= {*shell}
    for line in lines:
        assert "-plaintext" not in line
        if line.startswith("grpcurl "):
            assert all(f'-{name} "$QUARTET_TLS_{variable}"' in line for name, variable in GRPCURL_FILES.items())


def test_the_options_of_the_client_take_their_files_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT"):
        monkeypatch.setenv(f"QUARTET_TLS_{name}", "/nowhere/at/all")
    result = CliRunner().invoke(app, ["workers"])
    assert (result.exit_code, "go together" in result.output) == (2, True)
    monkeypatch.setenv("QUARTET_TLS_KEY", "/nowhere/at/all")
    result = CliRunner().invoke(app, ["workers"])
    assert (result.exit_code, "cannot read /nowhere/at/all" in result.output) == (1, True)


def test_if_the_model_takes_pictures_some_lines_send_one() -> None:
    lines = paste_lines("127.0.0.1:6001", "/usr/bin", takes_images=True)
    [generate] = [shlex.split(line) for line in lines if "--image" in line]
    assert Path(generate[generate.index("--image") + 1]).read_bytes().startswith(b"\xff\xd8")
    assert generate[:3] == ["quartet", "generate", "--chat"]
    assert not any("--image" in line for line in paste_lines("127.0.0.1:6001", "/usr/bin"))


@pytest.mark.grpcurl
def test_the_grpcurl_line_with_a_picture_is_json_with_its_bytes() -> None:
    lines = paste_lines("127.0.0.1:6001", "/nowhere", takes_images=True)
    [line] = [line for line in lines if line.startswith("grpcurl ") and "base64" in line]
    command = line.replace("grpcurl ", "printf '%s\\n' ", 1)
    words = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout.splitlines()
    [message] = json.loads(words[2])["start"]["chat"]["messages"]
    assert base64.b64decode(message["parts"][0]["media"]["data"]).startswith(b"\xff\xd8")
    assert message["parts"][1] == {"text": "Describe the picture."}


@in_empty_directory
def test_every_process_has_a_row_with_what_differs(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT)
    text = shown(tmp_path / "t.yaml")
    rows = rows_of(text)
    assert list(rows) == ["etcd", "prefill-0", "writer-0", "writer-1", "router"]
    assert rows["prefill-0"][:4] == ["prefill", "trtllm", "0 1", "free"]
    assert rows["writer-1"][:4] == ["decode", "trtllm", "3", "free"]
    assert "limits.cpus: 2" in rows["writer-1"]
    assert "TLLM_NUMA_AWARE_WORKER_AFFINITY=0" in rows["writer-1"]
    assert rows["router"][:4] == ["router", "-", "-", "free"]
    assert {
        "model_name: big",
        "model_path: /no/such/model",
        "engine.tensor_parallel_size: 2",
        "engine.extra_engine_args: no/such/file.yaml",
        "CUDA_VISIBLE_DEVICES=0,1",
        "TLLM_LOG_LEVEL='a b'",
        "HF_TOKEN=***",
        "aws_secret_access_key=***",
    } <= set(rows["prefill-0"])
    assert "private" not in text
    assert "policy.name: round_robin" in rows["router"]
    assert not any("block_size" in line for lines in rows.values() for line in lines), "that is a default"
    assert "127.0.0.1:1" in rows["etcd"][4]
    assert max(map(len, text.splitlines())) <= 100


@in_empty_directory
@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("trtllm/*.yaml")), ids=lambda file: file.stem)
def test_every_topology_for_gpus_can_be_shown_at_a_hundred_columns(file: Path) -> None:
    text = shown(file)
    assert max(map(len, text.splitlines())) <= 100
    assert "CUDA_VISIBLE_DEVICES=0" in text


@in_empty_directory
def test_options_are_shown_as_they_would_act() -> None:
    options = ("--engine", "torch", "--model", "/some/model", "--served-model-name", "m", "--router-port", "7")
    result = dry_run(CONFIGS / "trtllm/disagg.yaml", *options, "--allowed-local-media-path", "/srv", "--fail-fast")
    rows = rows_of(result.stdout)
    assert rows["prefill-0"][:3] == ["prefill", "torch", "-"]
    assert {"model_path: /some/model", "model_name: m", "engine.dtype: float32"} <= set(rows["decode-0"])
    assert rows["router"][3] == "7"
    assert "media.allowed_local_paths: ['/srv']" in rows["router"]
    assert "workers[0].gpus: left out, as the engine torch runs on none here" in result.stderr


@in_empty_directory
@pytest.mark.parametrize(("options", "shown_path"), [((), "/data"), (("--allowed-local-media-path", "/srv"), "/srv")])
def test_files_of_requests_may_be_allowed_by_the_variable_of_launch_scripts(
    options: tuple[str, ...], shown_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CONFIGS / "trtllm/epd_multimodal_image_and_embeddings.yaml"
    monkeypatch.setenv("ALLOWED_LOCAL_MEDIA_PATH", "/data")
    assert f"media.allowed_local_paths: ['{shown_path}']" in rows_of(shown(file, *options))["router"]
    monkeypatch.setenv("ALLOWED_LOCAL_MEDIA_PATH", "")
    assert not any("allowed_local_paths" in setting for setting in rows_of(shown(file))["router"])


@in_empty_directory
def test_workers_are_changed_by_name_and_values_name_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "/models/mine")
    options = (
        "--replicas",
        "decode=3",
        "--gpus",
        "prefill=6,7",
        "--replicas",
        "prefill=1",
        "--engine-args",
        "decode=d.yaml",
    )
    one_of_them = ("--set", "workers.decode-1.log.level=debug")
    rows = rows_of(shown(CONFIGS / "trtllm/disagg_router.yaml", *options, *one_of_them))
    assert {name: row[2] for name, row in rows.items() if row[0] in ("prefill", "decode")} == {
        "prefill-0": "6 7",
        "decode-0": "2",
        "decode-1": "3",
        "decode-2": "4",
    }
    assert ["log.level: debug" in rows[f"decode-{number}"] for number in range(3)] == [False, True, False]
    assert {"engine.extra_engine_args: d.yaml", "model_path: /models/mine"} <= set(rows["decode-2"])


KV_AWARE, EVENTS = "router.overrides.policy.name=kv_aware", "engine.publish_events_and_metrics"


@in_empty_directory
@pytest.mark.parametrize(
    ("name", "assignments", "silent"),
    [
        ("agg", [KV_AWARE], "decode-0"),
        ("disagg", [KV_AWARE], "prefill-0, decode-0"),
        ("e_pd", ["router.overrides.policy.prefill_name=kv_aware"], "decode-0"),
        ("disagg_router", [f"workers.decode-1.{EVENTS}=false"], "decode-1"),
        ("agg", ["router.overrides.policy={}"], "decode-0"),
        ("disagg", [], ""),
        ("disagg", [KV_AWARE, f"{EVENTS}=true"], ""),
        ("disagg", ["router.overrides.policy.decode_name=kv_aware"], ""),
        ("disagg_router", [f"{EVENTS}=false", "router.overrides.policy.name=least_loaded"], ""),
        ("disagg_router", [], ""),
    ],
)
def test_workers_that_announce_nothing_are_named_where_the_router_goes_by_caches(
    name: str, assignments: list[str], silent: str
) -> None:
    options = [part for assignment in assignments for part in ("--set", assignment)]
    printed = dry_run(CONFIGS / f"trtllm/{name}.yaml", *options).stderr
    notes = [line for line in printed.splitlines() if "announce none" in line]
    assert [note.partition(" cached, and ")[2] for note in notes] == (
        [f"{silent} announce none of it: set {EVENTS}=true for them"] if silent else []
    )


@in_empty_directory
def test_other_engines_announce_what_they_have_cached() -> None:
    printed = dry_run(CONFIGS / "trtllm/disagg.yaml", "--engine", "torch", "--set", KV_AWARE).stderr
    assert printed and "announce none" not in printed


@in_empty_directory
def test_a_shipped_topology_starts_by_its_name_or_its_path_anywhere() -> None:
    for name in ("trtllm/disagg", "configs/trtllm/disagg.yaml"):
        printed = dry_run(Path(name))
        assert "trtllm-disagg: nothing was started" in printed.stdout
        assert "is not here" not in printed.stderr  # the engine files that it names


@in_empty_directory
def test_a_file_of_the_working_directory_goes_before_a_shipped_topology_of_its_name() -> None:
    Path("disagg").write_text("namespace: own\nworkers: [{role: decode}]\n")
    result = CliRunner().invoke(app, ["up", "disagg", "--dry-run"])
    assert "own: nothing was started" in result.stdout


@in_empty_directory
@pytest.mark.parametrize(
    ("name", "hint"), [("disag", "did you mean disagg"), ("no/such.yaml", "`quartet up` lists those")]
)
def test_a_name_of_nothing_is_refused_with_names_like_it(name: str, hint: str) -> None:
    result = CliRunner().invoke(app, ["up", name, "--dry-run"])
    assert result.exit_code == 1
    assert f"there is no file {name}" in result.output and hint in result.output


@in_empty_directory
def test_without_a_name_it_lists_those_of_shipped_topologies() -> None:
    result = CliRunner().invoke(app, ["up"])
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "gpu/disagg" + " " * 34 + "One Prefill and one Decode worker on a GPU each" in lines
    assert {name for name in topologies() if any(line.split()[:1] == [name] for line in lines)} == {*topologies()}


_DOCUMENTED = [
    (dict(item.split("=", 1) for item in variables.split()), shlex.split(arguments.replace("\\\n", " "), comments=True))
    for variables, arguments in re.findall(
        r"((?:[A-Z_]+=\S+ )*)quartet up (configs/(?:[^`\n\\]|\\\n)+)",
        (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8"),
    )
]


def test_commands_of_the_documentation_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(_DOCUMENTED) > 15
    for variables, arguments in _DOCUMENTED:
        result = CliRunner(env=variables).invoke(app, ["up", *arguments, "--dry-run"])
        assert result.exit_code == 0, f"{arguments}: {result.output}"
        lost = [line for line in result.stderr.splitlines() if "wins over engine." in line or "model takes" in line]
        assert lost == [], f"{arguments} does not do what it says"


def test_a_setting_that_loses_to_an_engine_file_and_gpus_of_which_some_idle_are_named_by_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    command = "up configs/trtllm/agg_router.yaml --replicas decode=2 --gpus decode=4-7 --dry-run".split()
    printed = CliRunner().invoke(app, [*command, "--set", "engine.tensor_parallel_size=2"]).stderr
    for name in ("decode-0", "decode-1"):
        assert (
            f"{name}: extra_engine_args: tensor_parallel_size: 1 wins over engine.tensor_parallel_size = 2" in printed
        )
        assert f"{name}: gpus: 2 given, but the model takes 1" in printed


@in_empty_directory
def test_a_dry_run_reports_errors_as_a_real_run_does() -> None:
    result = CliRunner().invoke(
        app, ["up", str(CONFIGS / "agg.yaml"), "--dry-run", "--set", "router.overrides.polizy=x"]
    )
    assert result.exit_code == 1
    assert "polizy: unknown; did you mean policy" in result.output


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        (("--otel",), None),
        (("--otel", "--fail-fast"), None),
        (("--enable-otel",), None),
        (("--otel", "http://collector:4317"), "http://collector:4317"),
        (("--otel=http://collector:4317",), "http://collector:4317"),
    ],
)
def test_the_url_of_a_collector_may_be_left_out(
    options: tuple[str, ...], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for arguments in ([*options, "configs/agg.yaml"], ["configs/agg.yaml", *options]):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["up", "--dry-run", *arguments])
        assert result.exit_code == 0, result.output
        assert result.stdout.count("tracing.enabled: True") == 2
        assert result.stdout.count(f"tracing.endpoint: {endpoint}") == (2 if endpoint else 0)


@in_empty_directory
def test_what_tensorrt_llm_gets_for_its_spans_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def gets(*options: str) -> list[str]:
        lines = dry_run(Path("trtllm/disagg"), *options).stderr.splitlines()
        return [line for line in lines if "TensorRT-LLM gets" in line]

    def both(endpoint: str) -> list[str]:
        arguments = f"otlp_traces_endpoint: {endpoint}, return_perf_metrics: True"
        return [f"up        | {name}: TensorRT-LLM gets {arguments}" for name in ("prefill-0", "decode-0")]

    assert gets() == []
    assert gets("--otel", "http://collector:4317") == both("http://collector:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4317")
    assert gets("--otel") == both("http://other:4317")


_TWO = """\
model: {path: nobody/nothing}
engine: {kind: trtllm}
workers:
  - {role: prefill, overrides: {engine: {extra_engine_args: prefill.yaml}}}
  - {role: decode, overrides: {engine: {override_engine_args: {kv_cache_config: {enable_block_reuse: false}}}}}
"""


@in_empty_directory
def test_a_plan_with_wrong_arguments_of_tensorrt_llm_names_the_worker_and_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(_TWO)

    def planned() -> Result:
        return CliRunner().invoke(app, ["up", "two.yaml", "--dry-run"])

    result = planned()
    assert result.exit_code == 0
    assert "prefill-0: extra_engine_args: prefill.yaml is not here, so" in result.stderr
    assert "decode-0: override_engine_args: kv_cache_config.enable_block_reuse: is off" in result.stderr
    (tmp_path / "prefill.yaml").write_text("disable_overlap_scheduler: false\n")
    result = planned()
    assert (result.exit_code, result.stdout) == (1, "")
    said = "quartet: prefill-0: extra_engine_args: disable_overlap_scheduler: must be true on a prefill worker"
    assert said in result.stderr
    (tmp_path / "prefill.yaml").write_text("max_num_token: 8\n")
    assert "quartet: prefill-0: extra_engine_args: max_num_token: " in planned().stderr


@in_empty_directory
def test_a_plan_with_tls_says_what_will_be_encrypted(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(TEXT)
    assert "one of its own, with certificates" in shown(tmp_path / "shown.yaml", "--tls")
