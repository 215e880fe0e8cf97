"""Decoders: what a family's config.json means, and its forward pass."""
