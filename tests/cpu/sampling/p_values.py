"""Tests of distributions, in place of scipy.stats, whose import takes each test process a second."""

import torch


def chi_square(counts, expected):
    """Probability of counts [n] at least as far from the expected ones, which have the same sum."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def uniform_distance(draws):
    """Kolmogorov's statistic of draws [n] against numbers from 0 to 1, times the root of n.

    It is above 1.95 with a probability of 1 in 1,000.
    """
    draws = torch.as_tensor(draws, dtype=torch.float64).sort().values
    n = len(draws)
    above = torch.arange(1, n + 1) / n - draws
    return max(above.max(), (1 / n - above).max()).item() * n**0.5
