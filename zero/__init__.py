"""What fsdp.py needs beside its stages: a layer's parameters as one tensor, and what they cost.

Imports sharding and base/. Begin with units.py.
"""
