"""In every setting that is a path, of workers, routers and topologies, ``~`` and variables are replaced."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from quartet.config import PathText, build, with_value
from router.config import RouterConfig
from services.topology.topology import Choices, Topology, choose, plan_router, plan_workers
from services.workers.config import WorkerConfig

_LEAVES = (Path, PathText)
#: What a setting needs beside itself, by the beginning of its name.
_BESIDE: dict[str, Mapping[str, object]] = {
    "engine.extra_engine_args": {"engine.kind": "trtllm"},
    "server.tls.": {
        "server.tls": {"ca_file": "ca", "cert_file": "cert", "key_file": "key"},
        "events_key_file": "key",
    },
    "discovery.etcd.tls.": {"discovery.etcd.tls": {"cert_file": "cert", "key_file": "key"}},
    "discovery.etcd.password_file": {"discovery.etcd.user": "me"},
    "discovery.file.": {"discovery.file": {"directory": "d"}},
    "http.tls.": {"http.tls": {"cert_file": "cert", "key_file": "key"}},
    "secrets": {
        "hosts": {"here": {"address": "10.0.0.1", "first_port": 50100}},
        "router.hosts": ["here"],
        "workers": [{"role": "decode", "host": "here"}],
        "discovery.etcd.endpoints": ["10.0.0.1:2379"],
    },
}
#: Refused by workers, whatever it says: it is the router's.
_REFUSED = "allowed_local_media_path"


def path_settings(kind: Any, where: str = "") -> Iterator[str]:
    """The names of all fields of ``kind`` that hold paths, and of those in it."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        name = f"{where}.{item.name}" if where else item.name
        for hint in _members(hints[item.name]):
            if hint in _LEAVES:
                yield name
            elif is_dataclass(hint):
                yield from path_settings(hint, name)


def _members(hint: Any) -> Iterator[Any]:
    """The types of which a value of ``hint`` is made; of the items of lists, as of groups of workers, only paths."""
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is tuple:
        yield from (item for item in _members(get_args(hint)[0]) if item in _LEAVES)
    else:
        yield hint


KINDS: dict[str, tuple[Any, dict[str, object]]] = {
    "worker": (WorkerConfig, {"model_path": "m"}),
    "router": (RouterConfig, {}),
    "topology": (Topology, {"workers": [{"role": "decode"}]}),
}
SETTINGS = [(kind, name) for kind, (cls, _) in KINDS.items() for name in path_settings(cls) if name != _REFUSED]


def test_the_settings_are_found() -> None:
    of_worker = {name for kind, name in SETTINGS if kind == "worker"}
    assert of_worker >= {
        *("model_path", "engine.extra_engine_args", "custom_jinja_template", "events_key_file", "signing_keys_file"),
        *("server.tls.ca_file", "server.tls.cert_file", "server.tls.key_file", "discovery.file.directory"),
        *("discovery.etcd.tls.ca_file", "discovery.etcd.password_file"),
    }
    of_router = {name for kind, name in SETTINGS if kind == "router"}
    assert of_router >= {"http.tls.cert_file", "http.keys_file", "media.allowed_local_paths", "custom_chat_template"}
    assert ("topology", "model.path") in SETTINGS


@pytest.mark.parametrize(("kind", "name"), SETTINGS)
def test_home_and_variables_are_replaced(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("WHERE", "there")
    cls, settings = KINDS[kind]
    for beginning, beside in _BESIDE.items():
        if name.startswith(beginning):
            for other, value in beside.items():
                settings = with_value(settings, other, value)
    is_list = name == "media.allowed_local_paths"
    text = "~/$WHERE/${WHERE}.x"
    config: Any = build(cls, with_value(settings, name, [text] if is_list else text))
    for part in name.split("."):
        config = getattr(config, part)
    assert str(config[0] if is_list else config) == "/home/me/there/there.x"


def test_a_path_goes_through_a_topology_to_its_processes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/$me")
    settings = {
        "signing_keys_file": "~/$$keys",
        "workers": [{"role": "decode", "overrides": {"custom_jinja_template": "/t/$$t"}}],
    }
    choices = Choices(model=Path("/models/$$m"), media_paths=[Path("~/$$p")])
    topology = choose({**settings, "model": {"path": "/models/other"}}, choices).topology
    [plan] = plan_workers(topology, num_cores=1)
    worker, router = build(WorkerConfig, plan.settings), build(RouterConfig, plan_router(topology).settings)
    assert plan.model is not None
    assert (worker.model_path, plan.model.path) == ("/models/$m", "/models/$m")
    assert worker.signing_keys_file == router.signing_keys_file == Path("/home/$me/$keys")
    assert router.media.allowed_local_paths == (Path("/home/$me/$p"),)
    topology = build(Topology, settings)
    [plan] = plan_workers(topology, num_cores=1)
    assert build(WorkerConfig, plan.settings).custom_jinja_template == Path("/t/$t")
