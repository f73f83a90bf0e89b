"""What runs behind the last decoder layer."""
