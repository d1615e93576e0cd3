"""What `python FILE` shows and asks: each file has a function `teach`, and WITHOUT. Imports the
lesson's own file and proof/. Begin with form.py."""
