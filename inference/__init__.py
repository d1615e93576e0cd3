"""Generation beside generate.py: cache, batches, sampling, pipelined decoding, layouts of weights,
the command lines. Imports lessons, run/, tuning/ and prompts/ (adapters, conversations). Begin with
kv_cache.py."""
