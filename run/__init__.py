"""Above the lessons: configuration and flags, launch, a run and its files, metrics. Imports lessons
and base/. Begin with launch.py."""
