"""Prompt learning beside prompt_tuning.py: templates, data, the prompt file, its commands. Imports
lessons, run/, tuning/, train.py and inference/. Begin with template.py."""
