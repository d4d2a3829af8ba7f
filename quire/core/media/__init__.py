"""Images, video and audio of prompts: which positions need rows of an encoder, and where these are.

Rows themselves are on the device: quire.runner.media.
"""
