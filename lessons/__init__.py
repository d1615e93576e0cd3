"""What the demonstrations share: processes (ranks), and a tiny model with its gradients (demo)."""
