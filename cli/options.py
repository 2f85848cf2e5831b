"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from quartet.client import RequestPath, Sampling
from quartet.rpc.channels import TlsConfig

#: Where ``quartet up`` starts a router. ``services.topology.topology.DEFAULT_ROUTER_PORT`` is not imported: numpy and
#: Jinja would come with it. A test holds that both ports are equal.
DEFAULT_ROUTER = "127.0.0.1:50050"

RouterOption: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--router",
        metavar="HOST:PORT",
        envvar="QUARTET_ROUTER",
        help="A router. Several may be given; the next is tried when one can't be reached.",
    ),
]
PathOption: TypeAlias = Annotated[
    RequestPath,
    typer.Option(
        "--path",
        help="generate: one call a request. session: all requests on one stream. direct: tokens straight from Decode.",
    ),
]
TlsCaOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="Certificates that the router's must lead to.", rich_help_panel="TLS"),
]
TlsCertOption: TypeAlias = Annotated[
    Path | None, typer.Option("--tls-cert", help="Your own certificate chain.", rich_help_panel="TLS")
]
TlsKeyOption: TypeAlias = Annotated[
    Path | None, typer.Option("--tls-key", help="Its private key.", rich_help_panel="TLS")
]
ModelOption: TypeAlias = Annotated[
    str, typer.Option("--model", help="Name of the model; not needed where there is but one.")
]
MaxTokensOption: TypeAlias = Annotated[int | None, typer.Option("--max-tokens", help="Tokens of the answer at most.")]
TemperatureOption: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="0 always takes the most likely token.")
]
TopPOption: TypeAlias = Annotated[
    float | None, typer.Option("--top-p", help="Keep the smallest set of tokens that reaches this probability.")
]
TopKOption: TypeAlias = Annotated[int | None, typer.Option("--top-k", help="Keep the k most likely tokens.")]
SeedOption: TypeAlias = Annotated[
    int | None, typer.Option("--seed", help="With the same seed, the same request gives the same answer.")
]
StopOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer. May be given several times.")
]
TimeoutOption: TypeAlias = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="Time for the whole answer.")
]


def make_tls(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> TlsConfig | None:
    """TLS with these files; ``None``: none was given. Raises ``typer.BadParameter`` if only some were."""
    if ca_file is None and cert_file is None and key_file is None:
        return None
    if ca_file is None or cert_file is None or key_file is None:
        raise typer.BadParameter("--tls-ca, --tls-cert and --tls-key go together")
    return TlsConfig(ca_file=ca_file, cert_file=cert_file, key_file=key_file)


def make_sampling(
    max_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None
) -> Sampling:
    """Sampling parameters; ``None`` is the default. Raises ``InvalidRequestError`` naming the field."""
    default = Sampling()
    return Sampling(
        max_tokens=max_tokens,
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
        top_k=default.top_k if top_k is None else top_k,
    )
