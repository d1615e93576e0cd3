"""Runs of train.py that fine-tune: what their trainers do differently, and their files."""
