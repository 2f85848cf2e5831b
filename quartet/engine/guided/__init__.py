"""Guided decoding: grammars that outputs follow, compiled and turned into masks of tokens by llguidance.

``grammar`` reads what a request asks for. A router has ``checker`` refuse it in a child; ``compiler`` and ``masks`` are
an engine's: a request's ``Guide`` knows which token may come next.
"""
