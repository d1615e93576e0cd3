"""The layer below the techniques: process groups, the device queue, terminal streams, typed JSON; a
model's configuration, dropout, attention on one device, number formats. Imports torch. Begin with
groups.py."""
