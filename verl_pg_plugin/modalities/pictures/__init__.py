"""Pictures and videos between the tokens of a prompt or response."""
