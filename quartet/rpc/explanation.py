"""Why a request goes where it goes, in domain terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.discovery.base import Role
from quartet.discovery.place import Place


@dataclass(frozen=True, kw_only=True)
class PlaceOption:
    """One place, as a router's policy sees it for one request.

    Attributes:
        role: of its worker; a decode place may prefill itself.
        is_chosen: the request would go there, as things stand.
        num_matched_tokens: prompt tokens that are cached there.
        cost: what it would cost, in ``cost_unit``; ``None``: the policy weighs nothing, or the request can't go there.
        terms: what the policy went by; each name ends with its unit.
        obstacle: why the request can't go there now; empty: it can.
    """

    place: Place
    role: Role
    is_chosen: bool = False
    num_matched_tokens: int = 0
    cost: float | None = None
    cost_unit: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where a request would go now.

    Attributes:
        policy: the one that places requests.
        model, model_fingerprint: what would answer.
        num_waiting: choices that wait in the router's queue for this model; ``options`` are as if none did.
        options: every place of the model, the chosen ones first, then by cost.
        wait_s: seconds for which the router would keep it before it goes to the chosen ones, if nothing changed
            meanwhile; ``None``: it goes at once, or there is no room.
    """

    policy: str
    model: str
    model_fingerprint: str
    num_prompt_tokens: int
    num_waiting: int
    options: tuple[PlaceOption, ...]
    wait_s: float | None = None
