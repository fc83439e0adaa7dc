"""Tests of the replay and of opreplay-run."""
