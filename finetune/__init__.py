"""Fine-tuning: conversations, adapters, preferences, reinforcement learning, prompts, and their
files. Imports techniques, run/ and train.py; to write answers, inference/rollout.py. Begin with
sft.py."""
