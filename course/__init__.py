"""Lessons: each file has a function `teach`, and WITHOUT; exercises, bugs to hunt, the explorer
and `course.verify`. Imports all other folders but benchmarks/ and tests/. Begin with form.py."""
