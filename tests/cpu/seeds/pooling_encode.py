# fmt: off
# ruff: noqa
from vllm import LLM

# For pooling models (task={embed,classify,reward,score}) only
llm = LLM(model="intfloat/e5-mistral-7b-instruct", task="embed")  # Name or path of your model
output = llm.encode("Hello, my name is")
print(output)
