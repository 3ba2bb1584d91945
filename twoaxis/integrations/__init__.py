"""Programs of others that train models with our streams: transformers' Trainer, torchtitan."""
