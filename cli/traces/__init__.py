"""Request traces: their file format, and a generator of them."""
