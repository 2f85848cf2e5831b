"""What a check found: the one form in which everything here is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is, mildest first."""

    OK = "ok"
    WARNING = "warning"  # works, but not everything or not as well
    WRONG = "wrong"  # something that was asked for can't work


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at, in a word or two.
        verdict: how it stands.
        message: what was seen.
        advice: what to do; empty where nothing is to be done.
    """

    check: str
    verdict: Verdict
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, Verdict.OK, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """It works, but not everything or not as well."""
    return Finding(check, Verdict.WARNING, message, advice)


def wrong(check: str, message: str, advice: str) -> Finding:
    """Something can't work."""
    return Finding(check, Verdict.WRONG, message, advice)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict among ``findings``."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)
