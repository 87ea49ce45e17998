"""The repair: copies of a candidate without its damage, built and measured."""
