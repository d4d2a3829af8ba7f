# fmt: off
# ruff: noqa
from vllm import LLM

llm = LLM(model="/models/Qwen/Qwen3-4B",
          trust_remote_code=True,
          max_model_len=4096,
)

# 释放显存

# 删除 LLM 对象
del llm

# 触发垃圾回收
import gc
gc.collect()

# 清空 CUDA 缓存
import torch
torch.cuda.empty_cache()

from vllm import LLM

llm = LLM(model="/models/Qwen/Qwen3-4B",
          trust_remote_code=True,
          # tensor_parallel_size=2,
          gpu_memory_utilization=0.8,
          max_model_len=1024,
)

outputs = llm.generate("你好，请你介绍一下你自己")

outputs

for output in outputs:
    generated_text = output.outputs[0].text
    print(f"Generated text: {generated_text!r}")

text = [
    "你好，请你介绍一下你自己",
    "请问什么是机器学习",
    "请问如何理解大模型？"
]

outputs = llm.generate(text)

outputs

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
