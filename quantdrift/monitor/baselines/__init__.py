"""Baselines: learning them, decisions about them, and the view of what each signal knows."""
