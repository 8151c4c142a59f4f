"""Readable PyTorch references for every attention path of an LLM server; `fastattn` holds the fast twin of each."""
