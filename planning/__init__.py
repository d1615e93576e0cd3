"""Time and memory, predicted: the parts of planner.py, and what one rank of a large run would do.
Imports techniques and run/. Begin with inputs.py."""
