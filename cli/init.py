"""``quartet init``: writes a topology for a model of one's own, and a page that says how to use it."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
import yaml

from cli.output import reporting_errors
from quartet.config import build, escape_path
from quartet.discovery.base import Role
from quartet.discovery.checks import check_text
from quartet.engine.model_source import is_repository_id
from quartet.errors import ConfigError
from quartet.shipped import ROOT
from services.topology.groups import copied, share_out_gpus
from services.topology.topology import DEFAULT_MODEL_PATH, DEFAULT_ROUTER_PORT, Topology, find_model, plan_workers

TOPOLOGY, PAGE = "topology.yaml", "README.md"

_HTTP_PORT = 8000

# Of a CPU's pool, in blocks of 32 tokens: some GB at most, whatever the model.
_NUM_BLOCKS = 512

# The model may have to be fetched.
_START_TIMEOUT_S = 900

_NO_NAME = re.compile(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+")

_WORK = {
    Role.ENCODE: "turns pictures into embeddings",
    Role.PREFILL: "computes prompts, and hands their KV blocks to Decode",
    Role.DECODE: "generates tokens, and computes what prompts the router leaves to it",
}


class Device(StrEnum):
    """What the workers run on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Plan:
    """What the files are made of.

    Attributes:
        model: a folder or a repository.
        name: the model's, in requests.
        counts: how many workers each role has, one at least.
    """

    namespace: str
    model: str
    name: str
    device: Device
    counts: dict[Role, int]


def init(
    folder: Annotated[Path, typer.Argument(help="Made if there is none. Files in it are never replaced.")],
    *,
    model: Annotated[
        Path, typer.Option("--model", help="Folder of a checkpoint, or a Hugging Face repository.")
    ] = DEFAULT_MODEL_PATH,
    served_model_name: Annotated[
        str, typer.Option("--served-model-name", help="What requests call the model by; else its folder's name.")
    ] = "",
    encode: Annotated[int, typer.Option("--encode", min=0, help="Encode workers: for models with pictures.")] = 0,
    prefill: Annotated[
        int, typer.Option("--prefill", min=0, help="Prefill workers; 0: Decode workers compute the prompts.")
    ] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")] = 1,
    device: Annotated[Device, typer.Option("--device", help="cuda: a GPU for each worker.")] = Device.CPU,
) -> None:
    """Write a topology for a model of your own into a folder, and a README that says how to use it."""
    with reporting_errors():
        path, name = _find_model(model)
        name = _checked_name(served_model_name or name)
        roles = {Role.ENCODE: encode, Role.PREFILL: prefill, Role.DECODE: decode}
        plan = Plan(
            namespace=_NO_NAME.sub("-", folder.absolute().name).strip("-") or "quartet",
            model=path,
            name=name,
            device=device,
            counts={role: count for role, count in roles.items() if count},
        )
        settings = _settings(plan)
        _check(settings)
        _write(folder, {TOPOLOGY: _topology_text(plan, settings), PAGE: _page_text(plan)})
        print(f"{folder / TOPOLOGY} and {folder / PAGE} are written. Start it:")
        print(f"quartet up {shlex.quote(str(folder / TOPOLOGY))}")


def _find_model(model: Path) -> tuple[str, str]:
    """The model's path as a topology says it, and its name. Raises ``ConfigError``."""
    path, name = find_model(model)
    if not path.is_dir():
        if not is_repository_id(str(path)):
            raise ConfigError(f"--model: there is no folder {path}")
        return str(path), path.name.partition("@")[0]
    path = path.absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model: {path} is no checkpoint: it has no config.json")
    # The name of what ships stays true where Quartet is installed anew.
    is_shipped = path.is_relative_to(ROOT / "models")
    return str(path.relative_to(ROOT) if is_shipped else path), name or path.name


def _checked_name(name: str) -> str:
    """``name``, if requests can call a model so. Raises ``ConfigError``."""
    try:
        check_text("--served-model-name", name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not name:
        raise ConfigError("--served-model-name: the model's folder has no name: give one")
    return name


def _settings(plan: Plan) -> dict[str, object]:
    on_cpu = {"device": "cpu", "dtype": "float32", "num_blocks": _NUM_BLOCKS}
    on_gpus = {"device": "cuda:0", "dtype": "auto", "free_gpu_memory_fraction": 0.8}
    workers = list[dict[str, object]]()
    next_gpu = 0
    for role, count in plan.counts.items():
        gpus = ",".join(map(str, range(next_gpu, next_gpu + count)))
        workers.append(
            {"role": role.value, "replicas": count, **({"gpus": gpus} if plan.device is Device.CUDA else {})}
        )
        next_gpu += count
    return {
        "namespace": plan.namespace,
        "model": {"path": escape_path(plan.model), "name": plan.name},
        "engine": {"kind": "torch", **(on_cpu if plan.device is Device.CPU else on_gpus)},
        "router": {"port": DEFAULT_ROUTER_PORT, "http_port": _HTTP_PORT},
        "workers": workers,
        "start_timeout_s": _START_TIMEOUT_S,
    }


def _check(settings: dict[str, object]) -> None:
    """Raise ``ConfigError`` where the topology could not be started."""
    shared_out = copied(settings)
    share_out_gpus(shared_out)
    plan_workers(build(Topology, shared_out), num_cores=1)


def _topology_text(plan: Plan, settings: dict[str, object]) -> str:
    workers = " and ".join(f"{count} {role.value}" for role, count in plan.counts.items())
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    # Values of a topology may name variables; a name that looks so does not mean one.
    text = text.replace("${", "$${")
    return f"# A router, and workers on {_where(plan)}: {workers}. {PAGE} says how to use it.\n{text}"


def _where(plan: Plan) -> str:
    return "GPUs" if plan.device is Device.CUDA else "CPUs"


def _page_text(plan: Plan) -> str:
    rows = "\n".join(f"| `{role.value}` | {count} | {_WORK[role]} |" for role, count in plan.counts.items())
    chat = {"model": plan.name, "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 32}
    router, http = f"127.0.0.1:{DEFAULT_ROUTER_PORT}", f"127.0.0.1:{_HTTP_PORT}"
    return f"""# {plan.name}

`{TOPOLOGY}` starts these processes on one host, its workers on {_where(plan)}:

| service | replicas | what it does |
|---|---|---|
| `router` | 1 | takes requests: gRPC on {router}, OpenAI's HTTP and a page on {http} |
{rows}

| to | run |
|---|---|
| see what would be started | `quartet up {TOPOLOGY} --dry-run` |
| start it, and end it by Ctrl-C | `quartet up {TOPOLOGY}` |
| ask in a terminal | `quartet generate --chat 'Once upon a time' --max-tokens 32` |
| see the workers | `quartet workers`, or <http://{http}/> |
| measure it | `quartet bench --duration 10` |
| have more workers for once | `quartet up {TOPOLOGY} --replicas decode=2` |
| try it without the model's weights | `quartet up {TOPOLOGY} --engine mock` |
| see what this machine lacks | `quartet doctor` |

Over HTTP:

```
curl http://{http}/v1/chat/completions -d {shlex.quote(json.dumps(chat))}
```

What to change in `{TOPOLOGY}`:

- `workers`: `replicas` of each role{_gpu_advice(plan)}
- `engine`: {_memory_advice(plan)}
- `router`: its ports; 0 takes a free one
- `model`: `path` is a folder or a repository, `name` what requests call it by
"""


def _gpu_advice(plan: Plan) -> str:
    if plan.device is not Device.CUDA:
        return ""
    advice = ", and their `gpus`, such as `0,1` or `0-3`"
    num_workers = sum(plan.counts.values())
    if num_workers < 2:
        return advice
    shared = " ".join(f"--gpus {role.value}={','.join('0' * count)}" for role, count in plan.counts.items())
    return f"""{advice}. As it is, each of the {num_workers} workers has a GPU of its own, and one whose
  GPU is not there does not start. With one GPU, have all share it:
  `quartet up {TOPOLOGY} {shared} --set share_gpus=true --set engine.free_gpu_memory_fraction=0.4`.
  They start one after the other, and each takes that share of what those before it left. A fleet without Prefill
  (`quartet init --prefill 0`) needs a GPU less"""


def _memory_advice(plan: Plan) -> str:
    if plan.device is Device.CUDA:
        return "`free_gpu_memory_fraction`, the share of a GPU's free memory that KV blocks get"
    return "`num_blocks`, how many KV blocks of 32 tokens each worker has"


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write all of ``texts`` or, where one of the files exists or can't be written, none. Raises ``ConfigError``."""
    for name in texts:
        if os.path.lexists(folder / name):  # also a link to nowhere, which would be followed
            raise ConfigError(f"{folder / name} exists; nothing was written")
    placed = list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".init-") as beside:
            for name, text in texts.items():
                (Path(beside) / name).write_text(text, encoding="utf-8")
            for name in texts:
                placed.append((Path(beside) / name).rename(folder / name))
    except OSError as error:
        for file in placed:
            file.unlink(missing_ok=True)
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
