"""The relay on the serving path.

It forwards bytes unchanged, finds the exchanges in them and draws the first sample.
"""
