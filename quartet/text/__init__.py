"""Text in and out of token ids: tokenizer, chat template, incremental detokenizer, stop matcher.

Pure: nothing here uses the network, and the only files read are those that a caller names. The process that faces the
user runs it: the router, or the client that streams from a Decode worker directly. Neither needs torch or transformers.
"""
