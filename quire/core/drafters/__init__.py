"""Host drafters: propose tokens from the tokens of requests. One file per method, by its name."""
