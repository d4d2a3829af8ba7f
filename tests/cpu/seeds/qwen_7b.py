# fmt: off
# ruff: noqa
from vllm import LLM

llm = LLM(model="/models/qwen/Qwen2___5-7B",
        trust_remote_code=True,
        max_model_len=4096,
)

outputs = llm.generate("你好，请你介绍一下你自己")

print(outputs)
