"""What the adapters of external engines (vLLM, SGLang, TensorRT-LLM) share. Knows none of them."""
