"""Media code that several engines share: the pool of embeddings as tensors, and files of embeddings.

``rows_encoder`` imports torch late, in the threads that need it; ``file_sizer`` does not import it, and the other
modules import it at once.
"""
