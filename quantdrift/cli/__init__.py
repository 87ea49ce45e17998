"""The command line: one file for each noun, and `up`, which runs every role on one host."""
