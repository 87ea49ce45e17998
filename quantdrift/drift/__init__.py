"""Pure statistics: sequential detectors and intervals. No I/O."""
