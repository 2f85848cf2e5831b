"""From settings to a registry: which kind of discovery a deployment uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from quartet.discovery.base import Registry
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig, FileRegistry


class DiscoveryKind(StrEnum):
    """The registries that processes can share."""

    ETCD = "etcd"
    FILE = "file"


@dataclass(frozen=True, kw_only=True)
class DiscoveryConfig:
    """Where workers announce themselves.

    Attributes:
        kind: which registry.
        etcd: settings of ``etcd``.
        file: settings of ``file``; required for that kind.
    """

    kind: DiscoveryKind = DiscoveryKind.ETCD
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    file: FileConfig | None = None

    def __post_init__(self) -> None:
        """Refuse a kind without its settings."""
        if self.kind is DiscoveryKind.FILE and self.file is None:
            raise ValueError("file must name a directory where kind is file")

    def of_namespace(self, namespace: str) -> DiscoveryConfig:
        """The same registry, for processes of ``namespace``. Raises ``ValueError``: it is no name."""
        file = None if self.file is None else replace(self.file, namespace=namespace)
        return replace(self, etcd=replace(self.etcd, namespace=namespace), file=file)


def create_registry(config: DiscoveryConfig) -> Registry:
    """The registry that ``config`` names; nothing is connected yet."""
    if config.kind is DiscoveryKind.FILE:
        assert config.file is not None, "checked by the configuration"
        return FileRegistry(config.file)
    return EtcdRegistry(config.etcd)
