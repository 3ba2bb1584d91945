"""A small Llama-style decoder around any stream and any mixer."""
