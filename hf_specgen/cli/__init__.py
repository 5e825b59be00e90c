"""The command line ``hf-specgen``."""
