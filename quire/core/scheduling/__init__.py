"""Step planning: scheduler, sequence registry, request groups, fault isolation."""
