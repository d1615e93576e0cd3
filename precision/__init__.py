"""The parts of FP8 training: what the eight bits mean, which scale a tensor has, experts in FP8.

Imports moe, tensor_parallel and model_config. Begin with float8.py; ../fp8.py applies
them to a model.
"""
