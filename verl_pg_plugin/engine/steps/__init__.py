"""What wraps one forward step."""
