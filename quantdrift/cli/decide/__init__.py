"""Commands by which people decide: baselines, sampling, labels, plans."""
