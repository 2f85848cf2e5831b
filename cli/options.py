"""Options that several commands have. ``cli.app.spread_groups`` makes an option of each field of a dataclass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from quartet.client import GrammarKind, GuidedDecoding, QuartetClient, RequestPath, Sampling
from quartet.rpc.channels import TlsConfig

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
class RouterOptions:
    """Routers, and how to reach them."""

    router: Annotated[
        list[str],
        typer.Option(
            "--router",
            metavar="HOST:PORT",
            envvar="QUARTET_ROUTER",
            help="A router. Several may be given; the next is tried when one can't be reached.",
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

    def client(self) -> QuartetClient:
        """A client of these routers. Raises ``typer.BadParameter`` as ``tls`` does, and ``ConfigError``."""
        return QuartetClient(self.router, tls=self.tls)


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
