"""The Encode service: pictures to embeddings."""
