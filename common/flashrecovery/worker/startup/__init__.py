"""How a training process begins: bootstrap, zygote, import hooks, the script as ``__main__``."""
