"""Prompt learning beside prompt_tuning.py: templates, data, the prompt file, its commands. Imports
lessons, run/ and inference/. Begin with prompt_data.py."""
