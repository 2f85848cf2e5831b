"""Media of requests: fetched and checked here, and by nobody else. ``docs/multimodal.md`` tells what may be fetched."""
