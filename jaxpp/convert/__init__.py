"""Checkpoints of the world, in and out: Hugging Face directories and GGUF files, streamed onto shards.

A family of models says, for each of our weights, in which tensor of a file it lies and how (`Part`); everything here
reads that one map, in both directions.
"""
