"""The gate on recorded inputs and on live traffic: run candidate and reference, judge every slice."""
