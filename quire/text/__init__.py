"""Text processing: prompts to token ids, token ids to text."""
