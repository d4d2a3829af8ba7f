"""Options, facts about model and device, and the engine config resolved from both."""
