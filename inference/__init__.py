"""Generation beside generate.py: cache, sampling, batches, pipelined decoding, the command line."""
