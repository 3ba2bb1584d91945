"""Pretrained models: where they come from, how a method starts on them, and what is kept of a retrofit."""
