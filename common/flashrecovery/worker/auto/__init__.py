"""``--auto``: plain PyTorch scripts that have no line of recovery in them."""
