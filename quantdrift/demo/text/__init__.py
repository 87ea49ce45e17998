"""The demo of a language model: four languages, one of which 4 bits have damaged, behind llama.cpp's server."""
