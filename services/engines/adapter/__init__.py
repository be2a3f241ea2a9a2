"""What the adapters of external engines (vLLM, SGLang, TensorRT-LLM) share. Knows none of them.

There is no engine to inherit from: an adapter is an Engine of its own and calls the parts that fit.

lifetime     its engine's thread, as the event loop waits for it
profile      limits and layout digest, from what the started engine says of itself
site         what its legs share; its own Site has those fields and more
frames       what a decode leg says, numbered
tick         one emit for all that happened in one turn
load         its load report, from legs, blocks and counters
series       its own Prometheus series
cache_names  the engine's names of cached blocks, to ours
installed, words, refusals   before it runs: version, flags, requests it can't serve
"""
