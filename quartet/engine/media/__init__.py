"""Media code that several engines share: the pool of embeddings as tensors, and files of embeddings.

``rows_encoder`` imports torch late, in the threads that need it; the other modules import it at once.
"""
