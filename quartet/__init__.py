"""Quartet: large language models served as Encode, Prefill, Decode and Router gRPC services."""
