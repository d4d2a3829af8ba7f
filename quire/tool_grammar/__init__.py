"""What an answer is bound to, where that takes text and grammar: calls, what follows reasoning."""
