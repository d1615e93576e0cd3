"""Parts of attention: rotary positions, attention inside a document, around a ring of ranks, and in
blocks of rows on a CPU.

Imports dropout, model_config and base/; gpt.py imports rotary.py and document_mask.py. Begin with
document_mask.py: which scores are masked.
"""
