"""Benchmarks, and the tables that are made of their rows."""
