"""The built-in engine: Llama-family checkpoints by torch, on CPU or CUDA, over one paged KV pool.

This package computes steps (`runner.TorchRunner`); what runs in a step is services.engines.paged's business.
"""
