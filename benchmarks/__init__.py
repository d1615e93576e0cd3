"""What is measured and plotted: a command each, its numbers in results/. Imports all folders but
tests. Begin with report.py."""
