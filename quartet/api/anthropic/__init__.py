"""Anthropic's API of messages: requests read, and answers written."""
