"""What the demonstrations (python FILE) share."""
