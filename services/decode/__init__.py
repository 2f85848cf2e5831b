"""The Decode service: tokens, one step at a time."""
