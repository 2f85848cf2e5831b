"""``quartet doctor``: what this machine lacks for Quartet, and what to do about it."""
