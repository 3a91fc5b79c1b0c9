"""Tests that need several processes: real gloo worlds of 2 to 8 ranks."""
