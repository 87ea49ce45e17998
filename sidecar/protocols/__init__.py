"""What is understood of the wire: one module for each protocol that inference servers speak."""
