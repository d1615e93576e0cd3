"""All figures, as SVG: what comparisons/ has measured, and ranks_*.svg, pictures of the techniques,
which pictures.py draws. Imports schedules and the style of comparisons/. Begin with pictures.py."""
