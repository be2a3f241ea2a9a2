"""TensorRT-LLM behind the Engine protocol: context_only -> generation_only over its LLM API, handoff after prefill.

Written against published sources and run only against tests/engines/trtllm/stand_in.py, never against the real
library (it needs an NVIDIA GPU). The docstrings cite upstream files by the keys of this table; `#n` is a stored copy
whose commit isn't known, `@x` a commit of NVIDIA/TensorRT-LLM. The release aimed at is 1.3.0rc29.

  D1, D2  tensorrt_llm/disaggregated_params.py @01009a33, #56257787506
  L, L0   tensorrt_llm/llmapi/llm.py #55216765702, @4c05a748
  S, S0   tensorrt_llm/sampling_params.py @a98a9061, @000a01de
  R, R0   tensorrt_llm/executor/result.py @a678b91a, @005bc848
  E       tensorrt_llm/executor/executor.py @ed53795b
  A       tensorrt_llm/llmapi/llm_args.py #7019226376
  O       tensorrt_llm/grpc/openengine/servicer.py #57363279328, its tests #57483906658
  T       tests/unittest/llmapi/test_llm_disagg (first_gen_log_probs) #46247338375, sampler/sampler.py #57382244028
  U       tensorrt_llm/llmapi/disagg_utils.py #54588247121
  V       tensorrt_llm/serve/openai_disagg_service.py @00bb903d, #60331329338
  X       tensorrt_llm/_torch/pyexecutor/py_executor.py #736889464, #54965565749
  XS      tensorrt_llm/_torch/pyexecutor/sampler.py #4516135568
  M       tensorrt_llm/metrics/collector.py @050f80de, metrics/enums.py @0f6cdd08
  W       docs/source/features/disagg-serving.md @0434b982, docs features/sampling.html of 1.3.0rc24 and rc26
  Z       tensorrt_llm/serve/openai_server.py #51781230266, #54820179511
  Y       Dynamo 1.6.1, components trtllm
"""
