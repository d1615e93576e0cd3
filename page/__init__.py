"""The page in which a reader sets sizes and ranks and sees schedules and memory: HTML, JavaScript,
and explorer.py, which makes one file of them.

Imports schedules, model_config, planner, run/presets and comparisons/style. Begin with explorer.py.
"""
