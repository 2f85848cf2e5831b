"""What Prefill and Decode workers have in common: everything but their own RPC."""
