"""The comparator for embedding vectors."""
