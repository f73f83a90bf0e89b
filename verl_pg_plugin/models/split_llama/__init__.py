"""The split Llama file that a checkpoint carries."""
