"""The paths inside transformers and inside vLLM, each switched on by one line."""
