"""The diagnosis of a language model: which layers and matrices of a candidate make its answers diverge."""
