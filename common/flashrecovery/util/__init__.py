"""Small tools without any knowledge of recovery: clock, atomic files, import hooks, versions."""
