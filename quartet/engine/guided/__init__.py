"""Guided decoding: grammars that outputs follow, compiled and turned into masks of tokens by llguidance.

``grammar`` reads what a request asks for, also in routers, which refuse it there. ``compiler`` and ``masks`` are an
engine's: a request's ``Guide`` knows which token may come next.
"""
