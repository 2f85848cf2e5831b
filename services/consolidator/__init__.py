"""The consolidator: several sources' KV events as one feed."""
