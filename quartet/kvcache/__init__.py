"""KV blocks: their names, the pool that shares them, sequences, and hand-offs. Pure code: no I/O, no tensors."""
