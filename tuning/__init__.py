"""Fine-tuning: conversations, adapters, preferences, reinforcement learning, and their files.
Imports lessons, run/ and inference/, which writes answers. Begin with sft_data.py."""
