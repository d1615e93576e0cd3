"""Below the lessons: processes and groups, what host and device exchange, streams for people,
typed JSON. Imports torch, and nothing of ours outside this folder. Begin with world.py."""
