"""Pools in GPU memory: the driver beneath them, and the way ``cuda_ipc`` between workers of one host."""
