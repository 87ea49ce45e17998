"""The command line: one folder for each group of `quantdrift --help`, one file for each noun."""
