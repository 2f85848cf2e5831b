"""Models that Quartet makes itself."""
