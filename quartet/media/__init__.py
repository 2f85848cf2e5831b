"""Pictures and precomputed embeddings as files: what they are named, and what may be in them. Pure but for Pillow."""
