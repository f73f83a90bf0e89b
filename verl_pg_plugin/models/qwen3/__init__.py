"""The Qwen3 file that a checkpoint can carry."""
