"""The account of exchanges: what was offered, taken, lost and compared, and how far each came."""
