"""The most probable continuations, together. Beams share the blocks of what they have in common."""

from quire import LLM
from quire.core.params import BeamSearchParams


def main() -> None:
    llm = LLM("embedded")
    found = llm.beam_search(
        ["My favourite colour is"], BeamSearchParams(beam_width=3, max_tokens=8)
    )
    for sequence in found[0].sequences:
        print(f"{sequence.cum_logprob:8.3f}  {sequence.text!r}")


if __name__ == "__main__":
    main()
