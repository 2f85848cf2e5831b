"""Errors of requests."""

from __future__ import annotations


class RequestError(RuntimeError):
    """This request failed; the worker lives."""
