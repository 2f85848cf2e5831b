"""The streams between router and workers: many requests on each, by slot."""
