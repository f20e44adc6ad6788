"""A stand-in for vLLM in tests: the same command line, no model. See server.py."""
