"""Token ids to text, reasoning and tool calls."""
