"""Below the techniques: processes and groups, what host and device exchange, streams for people,
typed JSON; a model's configuration, dropout, attention on one device, number formats. Imports
torch. Begin with world.py."""
