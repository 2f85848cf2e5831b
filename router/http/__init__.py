"""The router's HTTP face: OpenAI's API, from the same pipeline as gRPC's Generate."""
