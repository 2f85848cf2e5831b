"""A real Prometheus that runs the files of ``deploy/prometheus``, only faster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from services.topology.launch import free_port
from tests.e2e.process import wait_until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
#: Where ``tools/prometheus.sh`` unpacks Debian's package.
UNPACKED = ROOT / ".tools/prometheus"
#: All windows of the rules are so much shorter, and Prometheus looks so much more often.
FASTER = 15
_TIMEOUT_S = 60.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def find_prometheus() -> Path | None:
    """The program: on the PATH, or as ``tools/prometheus.sh`` has unpacked it."""
    unpacked = UNPACKED / "usr/bin/prometheus"
    found = shutil.which("prometheus") or (str(unpacked) if unpacked.exists() else None)
    return None if found is None else Path(found)


class Prometheus:
    """Runs from ``with`` to its end."""

    def __init__(self, binary: Path, directory: Path, targets_url: str, gpu_address: str) -> None:
        """It asks ``targets_url`` for processes; at ``gpu_address`` are the figures of a worker's GPUs."""
        self._url = f"http://127.0.0.1:{free_port()}"
        self._log = directory / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        _write_files(directory, targets_url, gpu_address)
        self._command = (
            str(binary),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
        )

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._is_ready, _TIMEOUT_S, self.log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_TIMEOUT_S)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query, now."""
        result: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return result

    def up(self) -> dict[str, bool]:
        """Whether each process answers, by name."""
        return {
            series["metric"]["quartet_worker"]: series["value"][1] == "1" for series in self.query('up{job="quartet"}')
        }

    def firing(self) -> frozenset[str]:
        """The alerts that fire."""
        alerts: Sequence[dict[str, Any]] = self._get("alerts")["alerts"]
        return frozenset(alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing")

    def log(self) -> str:
        """The end of what it says."""
        return self._log.read_text()[-4000:]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=_TIMEOUT_S):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                data: dict[str, Any] = json.load(response)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


def faster(text: str) -> str:
    """A rule's duration, or an expression with all of its windows, so many times shorter."""
    return re.sub(r"\b(\d+)([smh])\b", lambda match: f"{_shorter_ms(int(match[1]), match[2])}ms", text)


def _shorter_ms(number: int, unit: str) -> int:
    return number * _UNITS_S[unit] * 1000 // FASTER


def _write_files(directory: Path, targets_url: str, gpu_address: str) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    for name in ("scrape_interval", "evaluation_interval"):
        config["global"][name] = faster(config["global"][name])
    [job] = config["scrape_configs"]
    [discovery] = job["http_sd_configs"]
    discovery.update(url=targets_url, refresh_interval=faster(discovery["refresh_interval"]))
    gpus = {"targets": [gpu_address], "labels": {"quartet_namespace": "e2e", "quartet_worker": "decode-0"}}
    config["scrape_configs"].append({"job_name": "gpus", "static_configs": [gpus]})
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = faster(rule["expr"])
        if "for" in rule:
            rule["for"] = faster(rule["for"])
    (directory / "alerts.yml").write_text(yaml.safe_dump(rules))
