"""From text files to a cached array of token ids."""
