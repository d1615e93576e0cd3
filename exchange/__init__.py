"""Tables of other people's formats, for huggingface.py: families of models, config.json. Imports
lessons, checkpoints/, and for ONNX inference/. Begin with architectures.py."""
