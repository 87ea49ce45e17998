"""The detectors, each a formula with its assumption, bound and source."""
