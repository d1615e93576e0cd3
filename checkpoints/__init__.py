"""The plumbing of checkpoint.py: folders, indexes, who writes what, the tokenizer's files. Imports
lessons and base/. Begin with index.py."""
