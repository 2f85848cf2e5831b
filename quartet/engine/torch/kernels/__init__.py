"""Kernels in Triton for the torch engine on GPUs. Nothing here is imported where a model runs on a CPU."""
