"""What ``quartet up`` does: plans a topology's processes, starts them and keeps them running."""
