"""Ways in which a layer mixes tokens, one file each."""
