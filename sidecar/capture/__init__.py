"""The capture process, off the serving path.

It decodes exchanges, draws the second sample, redacts and publishes.
"""
