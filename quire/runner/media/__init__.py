"""Rows of images, video and audio on the device."""
