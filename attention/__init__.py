"""Forms of attention beside the plain one in gpt.py: inside a window, inside a document, around a
ring of ranks.

Imports dropout, model_config and base/. Begin with local_attention.py: which scores are masked.
"""
