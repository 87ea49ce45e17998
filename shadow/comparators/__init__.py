"""What divergence means for each kind of output, one file each."""
