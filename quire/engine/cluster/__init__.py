"""Clusters: which nodes run the ranks of a model, and what is wrong with a node."""
