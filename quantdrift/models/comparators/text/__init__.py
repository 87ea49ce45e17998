"""The comparator for generated text, and its parts."""
