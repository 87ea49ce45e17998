"""The runtimes of references at a server that speaks the Open Inference Protocol."""
