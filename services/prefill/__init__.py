"""The Prefill service: prompts to KV blocks and a first token."""
