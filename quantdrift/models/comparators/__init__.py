"""The comparators: the definition of divergence for each kind of output, one file each."""
