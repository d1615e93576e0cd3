"""Fine-tuning: conversations, adapters, preferences, reinforcement learning, and their files.
Imports lessons, run/, exchange/, train.py, and inference/, which writes answers. Begin with
sft_command.py."""
