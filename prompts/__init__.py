"""Prompt learning beside prompt_tuning.py: templates, data, the prompt file."""
