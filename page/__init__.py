"""The page that explorer.py writes: its formulas, its translator, and its HTML, CSS and JS."""
