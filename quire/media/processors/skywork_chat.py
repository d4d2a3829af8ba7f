"""Images of Skywork-R1V: as InternVL of the hub has them."""

from quire.media.processors import internvl_chat

Processor = internvl_chat.Processor
