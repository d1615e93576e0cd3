"""What pipeline_parallel.py needs beside its schedules: who sends what when, and a backward in two
halves.

Imports schedules, gpt, overlap, tensor_parallel and base/. Begin with transfers.py: sends and
receives. nccl_model.py proves that they cannot wait for each other.
"""
