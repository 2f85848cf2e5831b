"""The ``quartet`` command."""
