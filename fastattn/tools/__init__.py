"""Tools that use both twins: the command line, the demo, the doctor, the benchmark."""
