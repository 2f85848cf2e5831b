"""``quartet secrets``: certificates and keys for the hosts of a topology, a folder for each."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from cli.output import reporting_errors
from cli.up import find_topology
from quartet.config import escape_path
from quartet.errors import ConfigError
from services.topology.topology import build_topology, read_settings


def secrets(
    topology: Annotated[str, typer.Argument(help="A file with hosts.")],
    folder: Annotated[Path, typer.Argument(help="Made if there is none. Keep it where only operators get to.")],
    *,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME.NAME=VALUE", help="Change one setting, as in quartet up."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=31, help="How long new certificates are valid.")] = 365,
) -> None:
    """Write certificates and keys for the hosts of a topology: a folder for each, to be copied there."""
    with reporting_errors(OSError, ValueError):
        try:
            # Imported here: only what makes certificates needs the package.
            from services.topology.host_secrets import SecretsFolder, provide_secrets
        except ModuleNotFoundError as error:
            raise ConfigError(f"certificates need the package {error.name}: pip install 'quartet[tls]'") from error
        settings = read_settings(find_topology(topology), assignments or (), os.environ)
        built = build_topology({"secrets": escape_path(str(folder)), **settings})
        written = provide_secrets(built, SecretsFolder(folder), valid=timedelta(days=days))
        for path in written:
            print(folder / path)
        if not written:
            print("all are there already")
        for name in built.hosts:
            print(f"# to {name}: {folder / 'hosts' / name}")
        print(f"# to etcd: {folder / 'etcd'}")
        print(f"# to who operates: {folder / 'operator'}")
        print(f"# to who asks for answers: {folder / 'client'}")
