"""What engines of several kinds share of media: the pool of embeddings as tensors, and files of embeddings.

Importing a module that reads files imports no torch; those that hold tensors do.
"""
