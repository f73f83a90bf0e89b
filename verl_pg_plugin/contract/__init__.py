"""The parts of verl and transformers that this plugin builds on, with their signatures."""
