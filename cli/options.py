"""Options that several commands have. ``cli.app.spread_groups`` makes an option of each field of a dataclass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from quartet.client import GrammarKind, GuidedDecoding, QuartetClient, RequestPath, Sampling
from quartet.client.discovery import find_routers
from quartet.client.sync import SyncClient
from quartet.errors import ConfigError
from quartet.rpc.channels import TlsConfig

if TYPE_CHECKING:
    from quartet.discovery.create import DiscoveryConfig
    from quartet.discovery.etcd_client import EtcdConfig

#: Where ``quartet up`` starts a router. ``services.topology.topology.DEFAULT_ROUTER_PORT`` is not imported: numpy and
#: Jinja would come with it. A test holds that both ports are equal.
DEFAULT_ROUTER = "127.0.0.1:50050"

PathOption: TypeAlias = Annotated[
    RequestPath,
    typer.Option(
        "--path",
        help="generate: one call a request. session: all requests on one stream. direct: tokens straight from Decode.",
    ),
]
ModelOption: TypeAlias = Annotated[
    str, typer.Option("--model", help="Name of the model; not needed where there is but one.")
]
MaxTokensOption: TypeAlias = Annotated[int | None, typer.Option("--max-tokens", help="Tokens of the answer at most.")]
TemperatureOption: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="0 always takes the most likely token.")
]
SeedOption: TypeAlias = Annotated[
    int | None, typer.Option("--seed", help="With the same seed, the same request gives the same answer.")
]
TimeoutOption: TypeAlias = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="Time for the whole answer.")
]
TtftTargetOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--ttft-target", metavar="MS", help="Time to the first token that is wanted, for a router over several pools."
    ),
]
ItlTargetOption: TypeAlias = Annotated[
    float | None, typer.Option("--itl-target", metavar="MS", help="Time between tokens that is wanted, likewise.")
]
TimeOption: TypeAlias = Annotated[
    bool, typer.Option("--time", help="Print where the time went, too, and how blocks were moved, on standard error.")
]


def seconds(milliseconds: float | None) -> float | None:
    """An option in milliseconds as the client takes it; ``None``: it was not given."""
    return None if milliseconds is None else milliseconds / 1000


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """How to reach an etcd, whichever addresses it has."""

    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            envvar="QUARTET_NAMESPACE",
            help="The deployment whose routers etcd lists.",
            rich_help_panel="Discovery",
        ),
    ] = "default"
    etcd_ca: Annotated[
        Path | None,
        typer.Option(
            "--etcd-ca",
            envvar="QUARTET_ETCD_CA",
            help="Certificates that etcd's must lead to; etcd is then dialled by TLS.",
            rich_help_panel="Discovery",
        ),
    ] = None
    etcd_cert: Annotated[
        Path | None,
        typer.Option(
            "--etcd-cert",
            envvar="QUARTET_ETCD_CERT",
            help="Your own certificate chain, if etcd asks for one.",
            rich_help_panel="Discovery",
        ),
    ] = None
    etcd_key: Annotated[
        Path | None,
        typer.Option("--etcd-key", envvar="QUARTET_ETCD_KEY", help="Its private key.", rich_help_panel="Discovery"),
    ] = None
    etcd_user: Annotated[
        str,
        typer.Option(
            "--etcd-user",
            envvar="QUARTET_ETCD_USER",
            help="A user of etcd, if it asks for one.",
            rich_help_panel="Discovery",
        ),
    ] = ""
    etcd_password_file: Annotated[
        Path | None,
        typer.Option(
            "--etcd-password-file",
            envvar="QUARTET_ETCD_PASSWORD_FILE",
            help="File that holds its password.",
            rich_help_panel="Discovery",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` naming the option: a file is not there, or one option stands without the other."""
        files = {
            "--etcd-ca": self.etcd_ca,
            "--etcd-cert": self.etcd_cert,
            "--etcd-key": self.etcd_key,
            "--etcd-password-file": self.etcd_password_file,
        }
        for option, file in files.items():
            if file is not None and not file.is_file():
                raise ConfigError(f"{option}: there is no file {file}")
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ConfigError("--etcd-cert, --etcd-key: one without the other")
        if bool(self.etcd_user) != (self.etcd_password_file is not None):
            raise ConfigError("--etcd-user, --etcd-password-file: one without the other")

    def config(self, endpoints: Sequence[str]) -> EtcdConfig:
        """Settings of the etcd at ``endpoints``; TLS if a certificate is given or an endpoint says https.

        Raises:
            ConfigError: they can't be used; the message begins with ``--etcd``.
        """
        # Imported here: etcd's stubs take as long as half of a client, and most commands are given addresses.
        from quartet.discovery.etcd_access import EtcdTls
        from quartet.discovery.etcd_client import EtcdConfig

        tls = None
        if self.etcd_ca or self.etcd_cert or any(endpoint.startswith("https://") for endpoint in endpoints):
            tls = EtcdTls(ca_file=self.etcd_ca, cert_file=self.etcd_cert, key_file=self.etcd_key)
        try:
            return EtcdConfig(
                endpoints=tuple(endpoints),
                namespace=self.namespace,
                tls=tls,
                user=self.etcd_user,
                password_file=self.etcd_password_file,
            )
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"--etcd: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EtcdOptions(EtcdAccess):
    """Where routers announce themselves."""

    etcd: Annotated[
        list[str] | None,
        typer.Option(
            "--etcd",
            metavar="HOST:PORT",
            envvar="QUARTET_ETCD",
            help="An address of the etcd that lists routers. Several may be given, also with commas between.",
            rich_help_panel="Discovery",
        ),
    ] = None

    def discovery(self, default: str = "") -> DiscoveryConfig | None:
        """Settings of discovery with these, or with etcd at ``default``; ``None``: neither is given.

        Raises ``ConfigError``.
        """
        endpoints = addresses_in(self.etcd or ([default] if default else []))
        if not endpoints:
            return None
        # Imported here: see ``config``.
        from quartet.discovery.create import DiscoveryConfig

        return DiscoveryConfig(etcd=self.config(endpoints))


def addresses_in(given: Sequence[str]) -> list[str]:
    """The addresses of an option that may be given several times, and each time hold several with commas between."""
    return [address.strip() for text in given for address in text.split(",") if address.strip()]


@dataclass(frozen=True, kw_only=True)
class RouterOptions(EtcdOptions):
    """Routers, and how to reach them."""

    router: Annotated[
        list[str],
        typer.Option(
            "--router",
            metavar="HOST:PORT",
            envvar="QUARTET_ROUTER",
            help="A router. Several may be given, also with commas between; the next one goes on where one can't be"
            " reached or is lost. Or see --etcd.",
        ),
    ] = field(default_factory=lambda: [DEFAULT_ROUTER])
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            envvar="QUARTET_TLS_CA",
            help="Certificates that the router's must lead to.",
            rich_help_panel="TLS",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", envvar="QUARTET_TLS_CERT", help="Your own certificate chain.", rich_help_panel="TLS"
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", envvar="QUARTET_TLS_KEY", help="Its private key.", rich_help_panel="TLS"),
    ] = None

    @property
    def tls(self) -> TlsConfig | None:
        """TLS with these files; ``None``: none was given. Raises ``typer.BadParameter`` if only some were."""
        if self.tls_ca and self.tls_cert and self.tls_key:
            return TlsConfig(ca_file=self.tls_ca, cert_file=self.tls_cert, key_file=self.tls_key)
        if self.tls_ca or self.tls_cert or self.tls_key:
            raise typer.BadParameter("--tls-ca, --tls-cert and --tls-key go together")
        return None

    async def client(self) -> QuartetClient:
        """A client of these routers. Raises ``typer.BadParameter`` as ``tls`` does, and ``ServingError``."""
        if not self.etcd:
            return QuartetClient(self.addresses(), tls=self.tls)
        discovery = self.discovery()
        assert discovery is not None, "etcd is given"
        return await QuartetClient.discover(discovery, tls=self.tls)

    def sync_client(self) -> SyncClient:
        """As ``client``, for use without an event loop."""
        if not self.etcd:
            return SyncClient(self.addresses(), tls=self.tls)
        discovery = self.discovery()
        assert discovery is not None, "etcd is given"
        return SyncClient.discover(discovery, tls=self.tls)

    def addresses(self) -> list[str]:
        """The routers, in the order to try; not for use in an event loop. Raises as ``client`` does."""
        if not self.etcd:
            return addresses_in(self.router)
        discovery = self.discovery()
        assert discovery is not None, "etcd is given"
        return asyncio.run(find_routers(discovery))


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn; ``None`` is the default of ``Sampling``."""

    max_tokens: MaxTokensOption = None
    temperature: TemperatureOption = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the smallest set of tokens that reaches this probability.")
    ] = None
    top_k: Annotated[int | None, typer.Option("--top-k", help="Keep the k most likely tokens.")] = None
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", metavar="FILE", help="The answer is JSON that follows the JSON schema in FILE."),
    ] = None

    def sampling(self) -> Sampling:
        """Sampling parameters. Raises ``InvalidRequestError`` naming the field, and ``typer.BadParameter``."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        schema: Path | None = given.pop("json_schema", None)
        if schema is None:
            return Sampling(**given)
        try:
            text = schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--json-schema {schema}: {error}") from error
        return Sampling(**given, guided=GuidedDecoding(GrammarKind.JSON_SCHEMA, text))
