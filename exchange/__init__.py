"""Tables of other people's formats, for huggingface.py: families of models, config.json. Imports
lessons and checkpoints/. Begin with architectures.py."""
