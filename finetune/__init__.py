"""Fine-tuning: conversations, adapters, preferences, reinforcement learning, prompts, and their
files. Imports techniques, run/, train.py, and inference/, which writes answers. Begin with
sft_command.py."""
