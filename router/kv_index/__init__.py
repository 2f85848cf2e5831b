"""What each worker has cached: KV events applied to one index of all workers' blocks."""
