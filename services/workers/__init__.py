"""What the workers of all roles have in common: configuration, dispatchers, media, life and process."""
