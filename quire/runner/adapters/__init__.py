"""What a worker has of adapters: their weights in slots, and the layers that add them."""
