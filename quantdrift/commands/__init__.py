"""The commands, one file for each noun; `quantdrift.cli` hangs them on the roof."""
