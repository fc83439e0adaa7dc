"""Tests of kernel substitution: signatures, selectors, the checked pass, comparisons, skeletons."""
