"""The plumbing of data.py: from text files to a cached array of token ids, and the tokenizers.
Imports base/. Begin with documents.py."""
