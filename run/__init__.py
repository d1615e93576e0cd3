"""Above the techniques: configuration and flags, launch, text and tokens, checkpoints, a run and
its files. Imports techniques and base/. Begin with launch.py."""
