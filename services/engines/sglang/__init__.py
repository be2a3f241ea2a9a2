"""SGLang behind the Engine protocol: its Engine on a thread of ours, prefill and decode by its own rendezvous."""

TESTED_VERSIONS = ("0.5.23",)
PACKAGES = ("sglang",)
INSTALL = "run deploy/engines/install.sh sglang, or pip install 'busway[sglang]' on a GPU machine (docs/engines.md)"
