"""The page that explorer.py writes: its formulas, and its HTML, CSS and JavaScript. Imports
lessons. Begin with formulas.py."""
