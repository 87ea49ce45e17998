"""The gate on recorded inputs: read them, run candidate and reference, judge every slice."""
