"""Which place gets which request: pure decisions on a snapshot."""
