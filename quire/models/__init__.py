"""Models: one file per Hugging Face model_type, and the builder that loads them."""
