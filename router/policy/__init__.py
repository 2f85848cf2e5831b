"""Which rank gets which request: pure decisions on a snapshot."""
