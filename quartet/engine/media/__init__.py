"""Media code that several engines share: the pool of embeddings as tensors, and files of embeddings.

``rows_encoder`` imports torch late, in the threads that need it, and ``file_sizer`` never; the others import it at once.
"""
