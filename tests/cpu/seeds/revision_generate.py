# fmt: off
# ruff: noqa
from vllm import LLM

llm = LLM(model="facebook/opt-125m", revision="main", task="generate", trust_remote_code=True)

# For generative models (task=generate) only
output = llm.generate("Hello, my name is")
print(output)
