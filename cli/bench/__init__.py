"""``quartet bench``: a streaming load generator, and what it measured as a table, as JSON and as a picture."""
