"""Beside generate.py: cache, batches, sampling, serving, quantised weights, evaluation; Hugging
Face and ONNX, in and out. Imports techniques, run/, finetune/. Begin with kv_cache.py."""
