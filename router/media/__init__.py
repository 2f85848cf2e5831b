"""Media of requests. Only the router fetches and checks them; ``docs/multimodal.md`` says what it may fetch."""
