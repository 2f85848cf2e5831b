"""Hand-offs and the ways to move blocks from worker to worker."""
