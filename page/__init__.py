"""Pages that Python writes into docs/: explorer.py one in which a reader sets sizes and ranks and
sees schedules and memory, of HTML and JavaScript; symbols.py a printed sheet; notebook.py the
course's notebook.

Imports schedules, model_config, planner, run/presets and comparisons/style. Begin with explorer.py.
"""
