# fmt: off
# ruff: noqa
from vllm import LLM

# For generative models (task=generate) only
llm = LLM(model="facebook/opt-125m", task="generate")  # Name or path of your model
output = llm.generate("Hello, my name is")
print(output)
