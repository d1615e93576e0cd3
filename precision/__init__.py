"""The parts of FP8 training: what the eight bits mean, which scale a tensor has, experts in FP8,
one kernel for a cast.

Imports moe, tensor_parallel, model_config and base/. Begin with float8.py; ../fp8.py applies them
to a model.
"""
