"""Text in and out of token ids: tokenizer, chat template, incremental detokenizer, stop matcher.

Pure: nothing here talks to anybody, and the only files read are those a caller names. Whoever faces
the user runs it: the router, or the client that streams from a Decode worker directly. Neither needs
torch or transformers.
"""
