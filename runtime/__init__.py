"""What a run needs beside the techniques: configuration, processes, files, messages."""
