"""The benchmark of diagnosis: faults are injected, and it is counted how often they are named first."""
