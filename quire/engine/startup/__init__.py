"""Engine start-up: executor, warm-up, CUDA graphs, tokenizer, grammars."""
