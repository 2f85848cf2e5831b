"""The engine seam, and what computes behind it: scheduling that is pure, and models that run it."""
