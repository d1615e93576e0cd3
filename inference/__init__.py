"""Generation beside generate.py: the cache, sampling, pipelined decoding, the command line."""
