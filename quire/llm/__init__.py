"""The offline API: LLM(model).generate(prompts). It owns an engine and inherits from nothing.

offline.py is what scripts call, engine.py the step-by-step face under it (LLMEngine), and
progress.py the bars and Ctrl-C.
"""

from __future__ import annotations

from quire.llm.engine import LLMEngine
from quire.llm.offline import LLM

__all__ = ["LLM", "LLMEngine"]
