"""Serving beside serve.py: attention to a paged cache, the engine that runs steps, an address for
clients. Built on inference/ (sampling, loading, layouts of weights), and imported by no other file.
Begin with paged_attention.py."""
