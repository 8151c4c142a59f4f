"""Where people run it: the paths inside transformers and inside vLLM, each switched on by one line."""
