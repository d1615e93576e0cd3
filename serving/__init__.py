"""Serving beside serve.py: attention to a paged cache, the engine that runs steps, an address for
clients. Imports serve.py, generate.py, inference/ and what these import. Begin with
paged_attention.py: what a step's rows look at."""
