# fmt: off
# ruff: noqa
from vllm import LLM
# 加载模型
llm = LLM(model="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B")

# 传输数据
outputs = llm.generate("你好，我是木羽")

# 获取结果
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
