"""Parts of attention: rotary positions, attention inside a document, and around a ring of ranks.

Imports dropout, model_config and base/; gpt.py imports rotary.py and document_mask.py. Begin with
document_mask.py: which scores are masked.
"""
