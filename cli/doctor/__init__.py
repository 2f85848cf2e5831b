"""``quartet doctor``: what of this machine Quartet would miss, and what to do about it."""
