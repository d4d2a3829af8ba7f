"""Loosening of sentence patterns, so that the model learns what a request means and not its exact words.

Patterns hold values in braces; only the words around them change. Used on the training side alone: the
evaluation side asks its held-out patterns as they are written.
"""

from __future__ import annotations

import random
import re

LEADS = """Hi! |Hello, |Hey, |Hey Quill, |Please: |Question: |Quick question: |One more thing: |So, |Okay, |Well, |And |Now: |Next: |
I have a question. |A question: |Could you help? |Tell me: |I wonder: |Just curious: |For my homework: |Let's see. |Good morning. |
Dear Quill, |Excuse me, |By the way, |Sorry, |Alright, |Then: |Please help me. |Hmm, |Can you help me? |Let me ask: |Task: |Request: |""".replace(
    "\n", ""
).split("|")
TAILS = """ Thanks!| Thank you.| Please.| please| thanks| Can you do that?| I need it now.| It is important.| Be quick.| I forgot.|
 Do you know?| for me| for me please| now| today| Any idea?| I would like to know.| Go ahead.| That is all.| Take your time.""".replace(
    "\n", ""
).split("|")
SWAPS = {
    "What is": ["What's", "What was", "Tell me", "Give me", "Do you know", "Which is", "I want to know", "I need", "Say", "Find", "State"],
    "what is": ["what's", "whats", "tell me", "give me", "which is", "i need"],
    "Tell me": ["Say", "Give me", "Let me know", "Show me", "I want to know", "Name", "State", "Report", "Can you tell me"],
    "Give me": ["Tell me", "Show me", "I want", "I need", "Provide", "Let me have", "Return", "Get me"],
    "Show me": ["Give me", "Display", "Let me see", "I want to see", "Get", "List", "Print"],
    "Find": ["Look for", "Search", "Get", "Locate", "Look up", "Seek", "Discover", "Find me"],
    "Please": ["Kindly", "Can you please", "Could you please", "Would you", "I ask you to", "Now"],
    "Can you": ["Could you", "Would you", "Will you", "Please", "Are you able to", "I want you to"],
    "Could you": ["Can you", "Would you", "Please", "Will you"],
    "I want to": ["I would like to", "I need to", "I wish to", "I'd like to", "Let me", "Help me", "I plan to", "We want to"],
    "I need": ["I want", "I would like", "Get me", "I require", "We need", "I am looking for"],
    "Calculate": ["Compute", "Work out", "Find", "Determine", "Evaluate", "Figure out", "Solve", "Count"],
    "Compute": ["Calculate", "Work out", "Determine", "Figure out", "Do"],
    "How much": ["What", "How many"],
    "Extract": ["Get", "Pull out", "Take", "Find", "Read off", "Pick", "Collect", "Give", "List", "Write down"],
    "Return": ["Give", "Output", "Write", "Answer with", "Print", "Produce", "Send back", "Make"],
    "Answer with": ["Reply with", "Output", "Give", "Write", "Respond with", "Return"],
    "Set": ["Put", "Make", "Change", "Start", "Configure"],
    "Create": ["Make", "Add", "Set up", "New:", "Open", "Build"],
    "Add": ["Put", "Insert", "Enter", "Save", "Include"],
    "Send": ["Write", "Deliver", "Mail", "Forward"],
    "Book": ["Reserve", "Get", "Order", "Arrange"],
    "Translate": ["Put", "Convert", "Render", "Turn", "Bring"],
    "Repeat": ["Echo", "Say", "Copy", "Write", "Return", "Print"],
    "text": ["passage", "message", "input", "note", "sentence", "paragraph"],
    "following": ["given", "next", "this"],
    "the": ["this", "that", "my", "a"],
}  # fmt: skip
FILLERS = "just really maybe again quickly kindly simply also actually then only exactly here perhaps please".split()


def swap(rng: random.Random, text: str) -> str:
    """Replace one or two known openings or words by another of the same meaning."""
    keys = [k for k in SWAPS if k in text]
    for key in rng.sample(keys, min(len(keys), rng.randint(1, 2))):
        text = re.sub(rf"(?<!\{{)\b{re.escape(key)}\b", rng.choice(SWAPS[key]), text, count=1)
    return text


def thin(rng: random.Random, text: str, share: float) -> str:
    """Drop words that hold no value, and add a filler now and then."""
    words = text.split(" ")
    kept = [w for w in words if "{" in w or rng.random() > share]
    if rng.random() < 0.3:
        kept.insert(rng.randint(0, len(kept)), rng.choice(FILLERS))
    return " ".join(kept) if any("{" in w for w in kept) or "{" not in text else text


def end(rng: random.Random, text: str) -> str:
    """Add a few words at the end where they cannot be taken for part of a value."""
    tail = rng.choice(TAILS)
    if text[-1] in ".?!" and tail[1].isupper():
        return text + tail
    if not text.rstrip('.?! "').endswith("}") and tail[1].islower():
        return text.rstrip(".?! ") + tail
    return text


def loosen(rng: random.Random, text: str, drop: bool = True) -> str:
    """One looser form of a pattern, often the pattern itself. drop False: no word may go."""
    if rng.random() < 0.4:
        return text
    if rng.random() < 0.5:
        text = swap(rng, text)
    if drop and "{" in text and rng.random() < 0.35:
        text = thin(rng, text, rng.choice([0.1, 0.2, 0.35]))
    if rng.random() < 0.25:
        text = rng.choice(LEADS) + text
    if rng.random() < 0.2:
        text = end(rng, text)
    if rng.random() < 0.08:
        text = text.rstrip(".?! ")
    return text
