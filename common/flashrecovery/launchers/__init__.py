"""Other launchers' spellings: what their options, variables and files mean for ``flashrecovery run``."""
